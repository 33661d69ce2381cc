"""Trainings with sharded parameters, to be held beside stage 2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.residency.models import WORDS, Gpt
from zerox import FusedShardedAdam
from zerox._C import Residency
from zerox.ranks import neighbours

WAYS = ("memory", "messages", "two machines")  # by which a rank gets at others' shards
CAP = 0.005  # MiB: every model has several buckets
LR = 1e-2


def residents(optimizer: Any) -> Residency:
    found: Residency = optimizer.inside.gather.residents
    return found


def build(model: nn.Module, stage: int = 3, hostile: bool = False, **options: Any) -> FusedShardedAdam:
    """``hostile``: in stage 3 each bucket is released as soon as no operator uses it."""
    optimizer = FusedShardedAdam(model.named_parameters(), lr=LR, stage=stage, **{"bucket_cap_mb": CAP, **options})
    if hostile and stage == 3:
        residents(optimizer).set_hostile(True)
        residents(optimizer).release_all()
    return optimizer


@contextmanager
def by_way(way: str, rank: int) -> Iterator[None]:
    """``two machines``: of two ranks each, which read the memory of their neighbours only."""
    messages = {"ZEROX_EXCHANGE": "messages"} if way == "messages" else {}
    machine = f"machine{rank // 2}" if way == "two machines" else neighbours.name_of_machine()
    with patch.dict(os.environ, messages), patch.object(neighbours, "name_of_machine", lambda: machine):
        yield


def run_by_way(rank: int, world_size: int, way: str, function: Callable[..., Any], *args: Any) -> Any:
    with by_way(way, rank):
        return function(rank, world_size, *args)


def made(stage: int = 3, hostile: bool = False, **options: Any) -> tuple[Gpt, FusedShardedAdam]:
    """A model, of the same values each time."""
    torch.manual_seed(0)
    model = Gpt()
    return model, build(model, stage, hostile, **options)


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert same_bits(one, other)


def assert_as_in_stage_2(run: Callable[[int], list[Tensor]]) -> None:
    """``run``: of a stage."""
    assert_same(run(2), run(3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train(
    model: nn.Module,
    optimizer: FusedShardedAdam,
    rank: int,
    loss: Callable[[Any, Tensor], Tensor],
    called: Any = None,
    steps: int = 3,
) -> list[Tensor]:
    """The losses, and the parameters after the last step."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        found = loss(model if called is None else called, batch(step, rank))
        found.backward()
        losses.append(found.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *values(model)]
