"""What a rank that has run out of batches can't follow, and how a loop that goes wrong is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.mean.tokens import make_model, summed_loss, tokens
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD

ROWS = 4
BATCHES = (4, 2)  # of ranks 0 and 1


def train(
    ours: Any, model: nn.Module, rank: int, batches: int, after: Mapping[int, Callable[[], Any]] | None = None
) -> None:
    """``after``: calls after some of the steps."""
    for step in range(batches):
        summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
        ours.clip_grad_norm_(1.0)
        ours.step()
        ours.zero_grad()
        (after or {}).get(step, bool)()


def error_in(block: AbstractContextManager[Any], function: Callable[[], Any]) -> str:
    """What a block with this function raises: at its end, or inside."""
    with pytest.raises((RuntimeError, KeyError, zerox.CheckpointError)) as raised, block:
        function()
    return str(raised.value)


def differ(rank: int, world_size: int) -> str:
    model = make_model()
    ours = FusedShardedSGD(model.parameters(), lr=0.1)
    ours.param_groups[0]["lr"] = 0.1 * (rank + 1)
    return error_in(ours.join(), lambda: train(ours, model, rank, 1))


def test_ranks_with_other_options_are_told() -> None:
    for said in run_ranks(differ, 2):
        assert "param groups with different options, such as lr" in said


def divide_differently(rank: int, world_size: int) -> str:
    model = make_model()
    ours = FusedShardedSGD(model.parameters(), lr=0.1)
    return error_in(ours.join("active" if rank else "all"), lambda: train(ours, model, rank, 1))


def test_ranks_in_another_join_are_told() -> None:
    for said in run_ranks(divide_differently, 2):
        assert "all ranks must be inside the same" in said


def save_to(ours: FusedShardedAdam, model: nn.Module, folder: str) -> None:
    zerox.save(f"{folder}/checkpoint", model, ours)


def load_from(ours: FusedShardedAdam, model: nn.Module, folder: str) -> None:
    zerox.load(f"{folder}/checkpoint", model, ours)


UNFOLLOWED: dict[str, Callable[[FusedShardedAdam, nn.Module, str], Any]] = {
    "zerox.save()": save_to,
    "zerox.load()": load_from,
    "full_state_dict()": lambda ours, *_: ours.full_state_dict(),
    "full_grad()": lambda ours, *_: ours.full_grad(ours.param_groups[0]["params"][0]),
    "full_state()": lambda ours, *_: ours.full_state(ours.param_groups[0]["params"][0]),
    "add_param_group()": lambda ours, *_: ours.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "broadcast_buffers()": lambda ours, model, _: ours.broadcast_buffers(model),
}


def call_unfollowed(rank: int, world_size: int, name: str, folder: str) -> str:
    model = make_model()
    ours = FusedShardedAdam(model.parameters())
    third = {2: lambda: UNFOLLOWED[name](ours, model, folder)}
    return error_in(ours.join(), lambda: train(ours, model, rank, BATCHES[rank], third))


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_can_t_be_followed_raises_on_all_ranks(name: str, tmp_path: Any) -> None:
    for said in run_ranks(call_unfollowed, 2, name, str(tmp_path)):
        assert name in said
        assert "rank 1 has run out of batches inside optimizer.join()" in said


def call_where_none_has_run_out(rank: int, world_size: int, name: str, folder: str) -> None:
    model = make_model()
    ours = FusedShardedAdam(model.parameters())
    save_to(ours, model, folder)
    with ours.join():
        train(ours, model, rank, 2, dict.fromkeys(range(2), lambda: UNFOLLOWED[name](ours, model, folder)))


@pytest.mark.parametrize("name", [name for name in UNFOLLOWED if name != "add_param_group()"])
def test_until_a_rank_has_run_out_everything_goes(name: str, tmp_path: Any) -> None:
    run_ranks(call_where_none_has_run_out, 2, name, str(tmp_path))


def raise_inside(rank: int, world_size: int) -> str:
    model = make_model()
    ours = FusedShardedAdam(model.parameters())
    return error_in(ours.join(), lambda: train(ours, model, rank, BATCHES[rank], {2: lambda: {}["a label"]}))


def test_a_loop_that_raises_inside_is_told_to_ranks_that_follow() -> None:
    first, second = run_ranks(raise_inside, 2)
    assert "a label" in first
    assert "rank 0 raised KeyError: 'a label'" in second


def without_join(rank: int, world_size: int) -> str:
    """Rank 1 has gone on to another call, as after its loop."""
    model = make_model()
    ours = FusedShardedAdam(model.parameters())
    last = {BATCHES[rank] - 1: ours.synchronize}
    return error_in(contextlib.nullcontext(), lambda: train(ours, model, rank, BATCHES[rank], last))


def test_without_it_ranks_with_unequal_numbers_of_steps_get_a_hint() -> None:
    for said in run_ranks(without_join, 2):
        assert "put their loops inside optimizer.join()" in said


def test_wrong_uses_are_refused() -> None:
    optimizer = FusedShardedAdam([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="divide must be"), optimizer.join("some"):
        pass
    other = FusedShardedAdam([nn.Parameter(torch.ones(2))])
    for inner in (optimizer, other):
        with optimizer.join(), pytest.raises(RuntimeError, match="inside another join"), inner.join():
            pass
    with optimizer.join():  # it ended well
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()


def measure_traffic(rank: int, world_size: int, joins: bool) -> tuple[int, int]:
    model = make_model()
    ours = FusedShardedAdam(model.parameters(), bucket_cap_mb=0.01)
    with ours.join() if joins else contextlib.nullcontext():
        train(ours, model, rank, 3)
    return ours.inside.manager.traffic


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_inside_sends_nothing_more(world_size: int) -> None:
    assert run_ranks(measure_traffic, world_size, True) == run_ranks(measure_traffic, world_size, False)
