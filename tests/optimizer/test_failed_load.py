"""A load_state_dict() that raises on some ranks: a script that swallows the error can't go on from two states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerox
from tests.bucket_manager.rig import same_bits
from tests.optimizer.models import backward, batch, make_model
from tests.pull.shares import with_shares
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

TOLD = r"zerox: rank 1 can't go on: its load_state_dict\(\) raised ValueError"


def build(stage: int = 2) -> tuple[nn.Module, FusedShardedAdam]:
    model = make_model()
    return model, FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=0.03, stage=stage)


def train(model: nn.Module, optimizer: FusedShardedAdam, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, batch(rank, step))
        optimizer.step()


def as_in_dino(optimizer: FusedShardedAdam, state: dict[str, Any]) -> str:
    """What load_state_dict() raised and the script swallowed."""
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""


@with_shares
def with_rank_0_s_share(rank: int, stage: int) -> tuple[nn.Module, FusedShardedAdam, dict[str, Any], str]:
    """A resume from the file that rank 0 saved alone; with this rank's own share."""
    model, optimizer = build(stage)
    train(model, optimizer, rank, range(2))
    own = copy.deepcopy(optimizer.state_dict())
    saved = [own]
    dist.broadcast_object_list(saved, src=0)
    again, resumed = build(stage)
    with optimizer.whole(), resumed.whole():
        again.load_state_dict(copy.deepcopy(model.state_dict()))
    return again, resumed, own, as_in_dino(resumed, saved[0])


def swallows(rank: int, world_size: int, stage: int) -> tuple[str, str]:
    model, optimizer, own, swallowed = with_rank_0_s_share(rank, stage)
    before = copy.deepcopy([state["step"] for state in optimizer.state.values() if "step" in state])
    backward(model, batch(rank, 2))
    with pytest.raises(RuntimeError) as told:
        optimizer.step()
    after = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.load_state_dict(own)
    twin, theirs = build(stage)
    train(twin, theirs, rank, range(2))
    for each in ((model, optimizer), (twin, theirs)):
        train(*each, rank, range(2, 4))
    with optimizer.whole(), theirs.whole():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(p.detach(), q.detach())
    return swallowed, str(told.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_load_that_failed_on_one_rank_is_raised_by_the_next_step_on_all(stage: int) -> None:
    (first, told), (second, told_too) = run_ranks(swallows, 2, stage)
    assert first == ""
    assert "is another rank's share" in second
    assert "can't be made whole any more" in second
    assert "call optimizer.consolidate_state_dict() on all ranks" in second
    assert told.startswith("zerox: rank 1 can't go on: its load_state_dict() raised ValueError")
    assert "begins anew" in told
    assert told == told_too


def goes_on(rank: int, world_size: int, way: str) -> int:
    model, optimizer, own, _ = with_rank_0_s_share(rank, stage=2)
    if way == "anew":
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    elif way == "as it is":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.load_state_dict(own)
    train(model, optimizer, rank, range(2, 4))
    return int(max(state["step"].max() for state in optimizer.state.values()))


@pytest.mark.parametrize(
    ("way", "steps"),
    [("anew", [2, 2]), ("as it is", [4, 2]), ("another file", [4, 4])],
    ids=["anew", "as it is", "other"],
)
def test_a_load_that_succeeds_ends_it_also_one_that_begins_anew(way: str, steps: list[int]) -> None:
    assert run_ranks(goes_on, 2, way) == steps


def saves(rank: int, world_size: int, path: str) -> None:
    model, optimizer = build()
    train(model, optimizer, rank, range(1))
    zerox.save(f"{path}/good", model, optimizer)
    model, optimizer, _, _ = with_rank_0_s_share(rank, stage=2)
    with pytest.raises(
        zerox.CheckpointError, match=r"bad could not be saved on rank 1: its load_state_dict\(\) raised"
    ):
        zerox.save(f"{path}/bad", model, optimizer)
    for export in (optimizer.full_state_dict, optimizer.consolidate_state_dict, optimizer.synchronize):
        with pytest.raises(RuntimeError, match=TOLD):
            export()
    optimizer.zero_grad()
    zerox.load(f"{path}/good", model, optimizer)
    zerox.save(f"{path}/better", model, optimizer)
    train(model, optimizer, rank, range(1, 2))


def test_nor_is_it_saved_and_a_checkpoint_is_a_way_out(tmp_path: Path) -> None:
    run_ranks(saves, 2, str(tmp_path))
    assert {each.name for each in tmp_path.iterdir()} == {"good", "better"}


def follows(rank: int, world_size: int) -> None:
    model, optimizer, _, _ = with_rank_0_s_share(rank, stage=2)
    with pytest.raises(RuntimeError, match=TOLD), optimizer.join():
        train(model, optimizer, rank, range(2 * (1 - rank)))


def test_a_rank_that_has_run_out_of_batches_tells_it_too() -> None:
    run_ranks(follows, 2)


def loads_alone(rank: int, world_size: int) -> None:
    model, optimizer = build()
    train(model, optimizer, rank, range(1))
    if rank == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank, range(1, 2))


def test_a_load_on_one_rank_alone_waits_for_nobody() -> None:
    run_ranks(loads_alone, 2)


def test_one_process_goes_on_as_with_torch() -> None:
    model, optimizer = build()
    train(model, optimizer, 0, range(1))
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(7)
    assert "7 elements of exp_avg" in as_in_dino(optimizer, wrong)
    train(model, optimizer, 0, range(1, 2))
