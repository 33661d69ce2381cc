"""An update tells autograd: a backward through values that a step has changed since raises, as after torch's AdamW."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks, run_threads
from zerox import FusedShardedAdam

CHANGED = "modified by an inplace operation"


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 8))


def step_inside(group: Any, stage: int, hidden: bool) -> str:
    """What the backward raises that a step comes before."""
    model = two_layers()
    optimizer = FusedShardedAdam(model.parameters(), process_group=group, stage=stage)
    if hidden:
        optimizer.overlap_gather(model)
    model(torch.ones(2, 8)).sum().backward()
    late = model(torch.ones(2, 8)).sum()
    optimizer.step()
    try:
        late.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "hidden"), [(1, False), (2, False), (2, True)])
def test_backward_through_values_of_before_a_step_raises(world_size: int, stage: int, hidden: bool) -> None:
    if world_size == 1:
        assert CHANGED in step_inside(None, stage, hidden)
    else:
        assert all(CHANGED in each for each in run_ranks(_step_inside, world_size, stage, hidden))


def _step_inside(rank: int, world_size: int, stage: int, hidden: bool) -> str:
    return step_inside(None, stage, hidden)


class TwoHeads(nn.Module):
    """Two losses over parameters that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left = two_layers()
        self.right = two_layers()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train_in_turn(model: TwoHeads, optimizer: torch.optim.Optimizer, batches: list[list[Tensor]]) -> None:
    """Each step's loss was computed before the step of the other half. ``batches``: by step, then to be averaged."""

    def loss(half: nn.Module, step: int) -> Tensor:
        return torch.stack([half(x).square().mean() for x in batches[step]]).mean()

    waiting = loss(model.left, 0)
    for step in range(len(batches) - 1):
        half = model.right if step % 2 == 0 else model.left
        following = loss(half, step + 1)
        waiting.backward()
        optimizer.step()
        optimizer.zero_grad()
        waiting = following


STEPS = 7


def halves_in_turn(group: dist.ProcessGroup | None, start: TwoHeads, stage: int) -> list[Tensor]:
    rank = 0 if group is None else group.rank()
    model = copy.deepcopy(start)  # not made anew: threads would share a generator
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, process_group=group, stage=stage)
    train_in_turn(model, optimizer, [[batch(rank, step)] for step in range(STEPS)])
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_losses_over_disjoint_parameters_train_as_under_adamw_with_a_step_in_between(
    world_size: int, stage: int
) -> None:
    model = TwoHeads()
    start = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_in_turn(model, adamw, [[batch(rank, step) for rank in range(world_size)] for step in range(STEPS)])
    for params in run_threads(halves_in_turn, world_size, start, stage):
        for ours, theirs in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=2e-5)


def _versions(rank: int, world_size: int) -> dict[str, list[int]]:
    model = two_layers()
    optimizer = FusedShardedAdam(model.parameters())
    optimizer.overlap_gather(model)
    seen = {"built": [param._version for param in model.parameters()]}
    for _ in range(2):  # the last layer's gradient is absent on rank 0: rank 1 has one
        loss = model[0](torch.ones(2, 8)).sum() if rank == 0 else model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["stepped"] = [param._version for param in model.parameters()]
    loss = model(torch.ones(2, 8)).sum()  # what is on its way arrives
    optimizer.synchronize()
    seen["arrived"] = [param._version for param in model.parameters()]
    loss.backward()
    return seen


def test_a_step_counts_once_and_the_arrival_of_a_hidden_gather_does_not() -> None:
    for seen in run_ranks(_versions, 2):
        assert seen["stepped"] == [version + 2 for version in seen["built"]]
        assert seen["arrived"] == seen["stepped"]


def test_a_step_without_gradients_changes_nothing_that_a_backward_needs() -> None:
    model = two_layers()
    optimizer = FusedShardedAdam(model.parameters())
    loss = model(torch.ones(2, 8)).sum()
    optimizer.step()
    loss.backward()


def test_backward_through_values_of_before_a_load_raises(tmp_path: Path) -> None:
    model = two_layers()
    optimizer = FusedShardedAdam(model.parameters())
    zerox.save(tmp_path / "saved", model, optimizer)
    loss = model(torch.ones(2, 8)).sum()
    loss_of_a_copy = copy.deepcopy(model)(torch.ones(2, 8)).sum()
    zerox.load(tmp_path / "saved", model, optimizer)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    loss_of_a_copy.backward()
