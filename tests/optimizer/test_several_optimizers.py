"""Several optimizers over disjoint parameters of one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import Chain, input_of, same_bits
from tests.optimizer.models import backward, batch, make_model, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

EPS = 1e-3  # see test_torch_behaviour.py


def split(rank: int, world_size: int, stages: tuple[int, int]) -> bool:
    """Whether two optimizers give the bits of one over all parameters."""

    def run(parts: list[int]) -> list[Tensor]:
        model = make_model()
        params = list(model.parameters())
        optimizers = [
            FusedShardedAdam(params[index :: len(parts)], lr=1e-2, bucket_cap_mb=0.02, stage=stage)
            for index, stage in enumerate(parts)
        ]
        for step in range(3):
            backward(model, batch(rank, step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in params]

    return all(same_bits(p, q) for p, q in zip(run(list(stages)), run([2]), strict=True))


@pytest.mark.parametrize("stages", [(1, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_optimizers_give_the_bits_of_one(world_size: int, stages: tuple[int, int]) -> None:
    assert run_ranks(split, world_size, stages) == [True] * world_size


class Parts(nn.Module):
    """Two chains; a rank uses those it is told to, in the order it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Chain(2, seed=1), Chain(2, seed=2)

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name in use:
            x = getattr(self, name)(x)
        return x


def different_branches(rank: int, world_size: int, uses: list[list[str]]) -> None:
    """``uses[step][rank]``; "" is a rank without a backward. Stage 2: nothing waits inside backward."""
    model, twin = Parts(), Parts()
    ours = [FusedShardedAdam(part.parameters(), lr=1e-2, eps=EPS) for part in (model.a, model.b)]
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=EPS, foreach=False)
    for step, use in enumerate(uses):
        for each in (model, twin):
            if use[rank]:
                each(input_of(rank, step), use[rank]).square().mean().backward()
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        for optimizer in (*ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_branches_that_reach_different_optimizers_on_different_ranks_train_in_stage_2() -> None:
    run_ranks(different_branches, 3, [["ab", "ba", "ab"], ["a", "b", ""], ["", "ab", "b"], ["b", "b", "b"]])


def alternating(rank: int, world_size: int, stage: int) -> None:
    """As a generator and its critic: each has backwards of its own, in which the other is frozen."""
    nets, twins = ([Chain(2, seed=1), Chain(2, seed=2)] for _ in range(2))
    ours: list[Any] = [FusedShardedAdam(net.parameters(), lr=1e-2, eps=EPS, stage=stage) for net in nets]
    theirs: list[Any] = [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=EPS, foreach=False) for net in twins]
    for step in range(6):
        trained, frozen = step % 2, 1 - step % 2
        for pair, optimizers in ((nets, ours), (twins, theirs)):
            pair[frozen].requires_grad_(False)
            pair[trained](pair[frozen](input_of(rank, step))).square().mean().backward()
            pair[frozen].requires_grad_(True)
            if pair is twins:
                for param in pair[trained].parameters():
                    param.grad = mean_over_ranks(param.grad, param, world_size)
            optimizers[trained].step()
            optimizers[trained].zero_grad()
        for net, twin in zip(nets, twins, strict=True):
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_two_optimizers_may_take_turns(stage: int) -> None:
    run_ranks(alternating, 2, stage)


def nothing_for_some(rank: int, world_size: int, stage: int) -> tuple[int, list[Tensor]]:
    """One small parameter lies whole on one rank: the others own nothing, and take part in everything."""
    param = nn.Parameter(torch.arange(5.0))
    twin = nn.Parameter(torch.arange(5.0))
    ours = FusedShardedAdam([param], lr=1e-2, stage=stage)
    theirs = torch.optim.AdamW([twin], lr=1e-2, foreach=False)
    for step in range(3):
        for each in (param, twin):
            (each * (rank + step + 1.0)).square().sum().backward()
        twin.grad = mean_over_ranks(twin.grad, twin, world_size)
        norm = ours.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_([twin], 0.5))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(param, twin)
    saved = ours.state_dict()
    ours.load_state_dict(saved)
    shares = [tensor.own.numel() for state in saved["state"].values() for tensor in state.values()]
    return sum(map(bool, shares)), [param.detach()]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_owns_nothing_takes_part(stage: int) -> None:
    results = run_ranks(nothing_for_some, 3, stage)
    assert sorted(owned for owned, _ in results) == [0, 0, 3]
    assert all(torch.equal(param, results[0][1][0]) for _, (param,) in results)
