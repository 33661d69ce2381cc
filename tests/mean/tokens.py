"""Batches of unequal weight, and the true mean of their losses' gradient, computed in float64 in one process."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

EPS = 1e-3  # see tests/optimizer/test_torch_behaviour.py
SEVERAL, ONE = 0.01, 1.0  # bucket_cap_mb of several buckets for the model below, and of one


def cap_mb(stage: int, several: bool) -> float:
    """``several``: buckets in stage 3. There the first backward that a rank follows waits for 2 s with more than one of
    them (Note [Backward at the pace of the exchange]), so not every case has them.
    """
    return SEVERAL if stage < 3 or several else ONE


def make_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(24, 130), nn.Tanh(), nn.LayerNorm(130), nn.Linear(130, 24))


def count_of(rank: int, step: int, micro: int) -> int:
    """How many tokens a micro-batch has: from 0 to 38."""
    return int(torch.randint(0, 39, (), generator=torch.Generator().manual_seed(7 + 1000 * rank + 10 * step + micro)))


def tokens(rank: int, step: int, micro: int, count: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(count_of(rank, step, micro) if count is None else count, 24, generator=generator)


def summed_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().sum() / 64


def true_sums(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The gradients of the losses' sum over these batches, in float64."""
    wide = copy.deepcopy(model).double()
    wide.zero_grad()
    for x in batches:
        summed_loss(wide, x.double()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in wide.parameters()]


def set_grads(model: nn.Module, grads: list[Tensor]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad.to(param.dtype)


def assert_near(model: nn.Module, twin: nn.Module, atol: float = 1e-7) -> None:
    """``atol``, and one unit in the last place."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-23, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
