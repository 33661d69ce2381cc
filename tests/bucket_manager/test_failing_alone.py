"""What one rank raises alone while all construct or adopt parameters: the others raise its reason at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from tests.bucket_manager.rig import Chain
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

FAILS = 1  # this rank
NO_ROOM = "can't allocate 17 GiB"
SOON_S = 20  # of a timeout of 60
CONSTRUCTOR = {
    "while it connects": "zerox.ranks.own_groups._gloo",
    "while it looks for neighbours": "zerox.ranks.neighbours._reads",
    "before it compares": "zerox.engine.Grads",
    "while it makes a bucket": "zerox.engine.Bucket",
}


def attempt(rank: int, target: str, call: Callable[[], object]) -> tuple[float, str]:
    """Seconds that it took, and what was raised; on one rank ``target`` has no room."""
    start = time.monotonic()
    here = patch(target, side_effect=MemoryError(NO_ROOM)) if rank == FAILS else contextlib.nullcontext()
    said = "no error"
    with here:
        try:
            call()
        except (RuntimeError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
    return time.monotonic() - start, said


def construct(rank: int, _: int, target: str) -> tuple[float, str, bool]:
    model = Chain(2)
    torch.optim.SGD(model.parameters())  # the first optimizer of a process imports dynamo: seconds
    seconds, said = attempt(rank, target, lambda: FusedShardedAdam(model.named_parameters()))
    again = FusedShardedAdam(model.named_parameters())  # nothing of the first attempt is in its way
    model.layers[0](torch.ones(1, model.layers[0].in_features)).sum().backward()
    again.step()
    return seconds, said, True


def add_a_group(rank: int, _: int, target: str) -> tuple[float, str, bool]:
    model, added = Chain(2), Chain(1)
    optimizer = FusedShardedAdam(model.named_parameters())
    group = {"params": [(f"added.{name}", param) for name, param in added.named_parameters()]}
    return *attempt(rank, target, lambda: optimizer.add_param_group(group)), True


def unfreeze(rank: int, _: int, target: str) -> tuple[float, str, bool]:
    model = Chain(2)
    model.layers[1].requires_grad_(False)
    optimizer = FusedShardedAdam(model.named_parameters())
    model.layers[1].requires_grad_(True)
    return *attempt(rank, target, optimizer.step), True


def check(answers: list[tuple[float, str, bool]]) -> None:
    for rank, (seconds, said, _) in enumerate(answers):
        if rank == FAILS:
            assert said == f"MemoryError: {NO_ROOM}"
        else:
            assert said.startswith("RuntimeError: zerox: "), said
            assert f"rank {FAILS} raised MemoryError: {NO_ROOM}" in said
        assert seconds < SOON_S


@pytest.mark.parametrize("moment", CONSTRUCTOR)
def test_what_one_rank_raises_in_the_constructor_the_others_raise_at_once(moment: str) -> None:
    check(run_ranks(construct, 3, CONSTRUCTOR[moment]))


@pytest.mark.parametrize("adopt", [add_a_group, unfreeze])
def test_what_one_rank_raises_where_parameters_are_added_the_others_raise_at_once(
    adopt: Callable[..., tuple[float, str, bool]],
) -> None:
    check(run_ranks(adopt, 3, "zerox.engine.Bucket"))
