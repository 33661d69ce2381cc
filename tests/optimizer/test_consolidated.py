"""consolidate_state_dict(): state_dict() of one rank is whole once; and a share that is pickled says what it lacks."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS
from tests.optimizer.test_full_state import build, train
from tests.pull.shares import with_shares
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, save, sliced_tensor
from zerox.sliced_tensor import SlicedTensor


def is_whole(state_dict: dict[str, Any]) -> bool:
    kinds = {type(tensor) for state in state_dict["state"].values() for tensor in state.values()}
    assert len(kinds) == 1
    return kinds != {SlicedTensor}


@with_shares
def consolidates(rank: int, world_size: int, kind: str, to: int) -> None:
    model, optimizer = build(kind)
    train(model, optimizer, rank, range(2))
    optimizer.consolidate_state_dict(to)
    full = optimizer.full_state_dict(to)
    optimizer.param_groups[0]["lr"] = 0.25
    get_optimizer_state_dict(model, optimizer)  # DCP's slices don't use it up
    found = optimizer.state_dict()
    assert is_whole(found) == (rank == to)
    assert found["param_groups"][0]["lr"] == 0.25, "groups are those of now"
    assert bool(full) == (rank == to)
    for number, state in full.get("state", {}).items():
        for key, tensor in state.items():
            assert same_bits(found["state"][number][key], tensor), (number, key)
    assert not is_whole(optimizer.state_dict()), "once"
    # Every rank goes on from what one rank saved.
    saved = [found]
    dist.broadcast_object_list(saved, src=to)
    again, loaded = build(kind, seed=1)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved[0])
    for each in ((model, optimizer), (again, loaded)):
        each[1].param_groups[0]["lr"] = 0.01
        train(*each, rank, range(2, 4))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("kind", ["fp32", "amsgrad", "bf16 remainder, 8-bit moments", "fp64"])
@pytest.mark.parametrize("to", [0, 1])
def test_state_dict_of_one_rank_is_whole_once_and_all_go_on_from_it(kind: str, to: int) -> None:
    assert kind in KINDS
    run_ranks(consolidates, 2, kind, to)


@with_shares
def changed(rank: int, world_size: int) -> list[str]:
    """After which changes of the state what was consolidated before them is given out."""
    given_out = []
    for change in ("step", "load", "add", "graph", "nothing"):
        model, optimizer = build("fp32")
        train(model, optimizer, rank, range(1))
        share = optimizer.state_dict()
        optimizer.consolidate_state_dict()
        if change == "step":
            train(model, optimizer, rank, range(1, 2))
        elif change == "load":
            optimizer.load_state_dict(share)
        elif change == "add":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        elif change == "graph":  # the replay of one changes the state and calls nothing
            optimizer.inside.buckets[0].steps += 1
        if rank == 0 and is_whole(optimizer.state_dict()):
            given_out.append(change)
    return given_out


def test_a_consolidated_state_is_not_given_out_once_the_state_has_changed() -> None:
    assert run_ranks(changed, 2)[0] == ["nothing"]


def test_alone_nothing_changes() -> None:
    model, optimizer = build("fp32")
    train(model, optimizer, 0, range(1))
    before = optimizer.state_dict()
    optimizer.consolidate_state_dict()
    for _ in range(2):
        assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("to", [1, -1, "cpu", None])
def test_a_rank_that_is_not_there_is_refused(to: Any) -> None:
    _, optimizer = build("fp32")
    for method in (optimizer.consolidate_state_dict, optimizer.full_state_dict):
        with pytest.raises(ValueError, match=f"to must be one of the optimizer's ranks, 0 to 0, got {to!r}"):
            method(to)


# ---- pickling a share


def saves_consolidated(optimizer: FusedShardedAdam) -> None:
    optimizer.consolidate_state_dict()
    found = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save(found, io.BytesIO())


WAYS: dict[str, Callable[[Any, FusedShardedAdam, str], Any]] = {
    "deepcopy": lambda model, optimizer, path: copy.deepcopy(optimizer.state_dict()),
    "to another process": lambda model, optimizer, path: ForkingPickler.dumps(optimizer.state_dict()),
    "DCP": lambda model, optimizer, path: dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path),
    "DCP, async": lambda model, optimizer, path: dcp.async_save(
        get_optimizer_state_dict(model, optimizer), checkpoint_id=path
    ).result(),  # type: ignore[union-attr]
    "zerox.save": lambda model, optimizer, path: save(path, model, optimizer),
    "consolidated": lambda model, optimizer, path: saves_consolidated(optimizer),
    "full": lambda model, optimizer, path: torch.save(optimizer.full_state_dict(), io.BytesIO()),
    "torch.save": lambda model, optimizer, path: torch.save(optimizer.state_dict(), io.BytesIO()),
    "pickle": lambda model, optimizer, path: pickle.dumps(optimizer.state_dict()),
}


@with_shares
def pickles(rank: int, world_size: int, path: str) -> dict[str, list[str]]:
    """The warnings of each way to copy or save."""
    model, optimizer = build("fp32")
    train(model, optimizer, rank, range(1))
    told = {}
    sliced_tensor._warn_of_pickling.cache_clear()
    for way, do in WAYS.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            do(model, optimizer, f"{path}/{way}")
        told[way] = [str(each.message) for each in seen if "zerox" in str(each.message)]
    return told


def test_a_share_that_is_pickled_warns_once_and_names_the_ways_out(tmp_path: Path) -> None:
    for told in run_ranks(pickles, 2, str(tmp_path)):
        assert {way for way, messages in told.items() if messages} == {"torch.save"}, "not for a copy or a whole; once"
        [message] = told["torch.save"]
        for way in ("zerox.save()", "full_state_dict()", "torch.distributed.checkpoint", "consolidate_state_dict()"):
            assert way in message
