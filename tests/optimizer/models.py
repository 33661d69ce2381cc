"""Small models and a training loop that the optimizer tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerox import FusedShardedAdam

THREE_RULES: tuple[dict[str, Any], ...] = ({}, {"rule": "sgd", "momentum": 0.8}, {"rule": "lion", "weight_decay": 0.1})
# Every kind of state and master there is: the parameters' dtype, and options of make_optimizer().
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "fp64": (torch.float64, {}),
    "bf16 remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16 fp32": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16 no master": (torch.bfloat16, {"master_weights": None}),
    "fp16 fp32": (torch.float16, {"master_weights": "fp32"}),
    "fp16 no master": (torch.float16, {"master_weights": None}),
    "fp32, bf16 moments": (torch.float32, {"state_dtype": torch.bfloat16}),
    "bf16 remainder, 8-bit moments": (torch.bfloat16, {"state_dtype": "8bit"}),
    "amsgrad, 8-bit moments": (torch.float32, {"state_dtype": "8bit", "amsgrad": True}),
    "three rules, 8-bit state": (torch.bfloat16, {"state_dtype": "8bit", "groups": THREE_RULES}),
}


def make_optimizer(params: Iterable[Any], groups: Sequence[dict[str, Any]] = ({},), **options: Any) -> FusedShardedAdam:
    """``groups``: the options of each param group; the parameters, with or without names, go to them in turn."""
    given = list(params)
    count = len(groups)
    if count == 1:
        return FusedShardedAdam(given, **groups[0], **options)
    return FusedShardedAdam([{"params": given[i::count], **each} for i, each in enumerate(groups)], **options)


class Mixed(nn.Module):
    """Small and large parameters, a scalar, a tied matrix, and a branch that some batches don't take."""

    def __init__(self, width: int = 72, hidden: int = 130) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.outer = nn.Linear(hidden, width)
        self.twice = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.branch = nn.Linear(width, width)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.twice.weight

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        x = self.outer(self.norm(torch.tanh(self.inner(x)))) * self.gain
        x = self.twice(torch.tanh(self.twice(x)))
        if branch:
            x = x + self.branch(x)
        return self.head(x)


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Mixed:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Mixed().to(dtype)


def batch(rank: int, step: int, micro: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(4, 72, generator=generator).to(dtype)


def backward(model: nn.Module, x: Tensor, **kwargs: Any) -> None:
    model(x, **kwargs).float().square().mean().backward()


def watch_gradients(model: nn.Module) -> dict[Tensor, Tensor]:
    """Takes a copy of each gradient that autograd leaves in p.grad from now on, before anybody takes it away."""
    seen: dict[Tensor, Tensor] = {}

    def take(param: Tensor) -> None:
        assert param.grad is not None
        seen[param] = param.grad.detach().clone()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(take)
    return seen


def train(
    rank: int,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    clip: float | None = None,
    hold: bool = False,
    device: str = "cpu",
    **options: Any,
) -> tuple[list[Tensor], dict[tuple[str, int], dict[str, Tensor]], list[float]]:
    """Trains :class:`Mixed`; returns its parameters, this rank's state and the norms, on the CPU.

    State is by parameter and its first element that this rank owns, 1-D in memory order.
    """
    model = make_model(dtype).to(device)
    optimizer = make_optimizer(model.named_parameters(), lr=1e-2, **options)
    optimizer.inside.manager.flights.hold_back(hold)
    norms = []
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                backward(model, batch(rank, step, micro, dtype).to(device), branch=step == 1)
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
    state = {
        (bucket.members[segment.slot].name, segment.param_start): {
            key: memory_order(each).to("cpu", copy=True) for key, each in own.items()
        }
        for bucket in optimizer.inside.buckets
        for segment, (_, own) in zip(bucket.own_segments, bucket.state_of_own(), strict=True)
    }
    return [p.detach().to("cpu", copy=True) for p in model.parameters()], state, norms


def mean_over_ranks(grad: Tensor | None, like: Tensor, world_size: int) -> Tensor | None:
    """The contract's mean of what each rank gives, on the CPU."""
    if world_size == 1:
        return grad
    has = torch.tensor([grad is not None])
    everyone_has = [torch.empty_like(has) for _ in range(world_size)]
    dist.all_gather(everyone_has, has)
    if not any(bool(each) for each in everyone_has):
        return None
    mine = (torch.zeros_like(like) if grad is None else grad.contiguous()).cpu()
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine)
    return mean_in_rank_order(parts, like)


def mean_in_rank_order(parts: Sequence[Tensor | None], like: Tensor, divisor: float | None = None) -> Tensor | None:
    """The contract's mean: summed in rank order in fp32 (fp64 for fp64), divided once, rounded once.

    ``divisor``: None for the number of parts. Of gradients on some ranks only the others count as zero; of none at all
    there is no mean.
    """
    if all(part is None for part in parts):
        return None
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    first, *others = [torch.zeros_like(like) if part is None else part for part in parts]
    total = first.to(wide)
    for part in others:
        total = total + part.to(wide)
    return (total / (divisor or len(parts))).to(like.dtype).to(like.device)


def own_part(param: Tensor, state: Tensor, start: int) -> Tensor:
    """The elements of ``param`` that a state view covers, in memory order, as 1-D."""
    return memory_order(param)[start : start + state.numel()]


def memory_order(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
