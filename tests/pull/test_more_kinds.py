"""State of classes of torch's kind, and masks: one rank writes all of it. What it can't read raises."""

from __future__ import annotations

import copy
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.local_optimizers.classes import ELEMENTWISE, OWN
from tests.local_optimizers.test_bits import Pair
from tests.local_optimizers.test_state import same, same_state, shared
from tests.pull.test_rank_0_saves import loaded, saved
from tests.ranks import run_ranks
from tests.sparsity import trained as masked
from zerox import FusedShardedAdam, ShardedOptimizer, sliced_tensor, sparse_params
from zerox.sliced_tensor import SlicedTensor

CLASSES = [*ELEMENTWISE, *OWN]
MESSAGES = {"ZEROX_EXCHANGE": "messages"}


def read(data: bytes) -> Any:
    """Without the empty states of parameters that have none, which full_state_dict() leaves out."""
    found = loaded(data)
    return {**found, "state": {number: state for number, state in found["state"].items() if state}}


def saves_each(
    rank: int, world_size: int, names: list[str], dtype: torch.dtype, stage: int, where: dict[str, str]
) -> None:
    for name in names:
        with patch.dict(os.environ, where):
            pair = Pair(rank, world_size, name, dtype, stage=stage)
        for number in range(3):  # the branch has no gradient in the first step, and one layer none in any but the last
            found = saved(pair.ours.state_dict()) if rank == number % world_size else b""
            whole = shared(pair.ours.full_state_dict())
            if found:
                assert same_state(read(found), whole), (name, number)
            pair.step(number, branch=number == 1)
        found = saved(pair.ours.state_dict()) if rank == 0 else b""
        if rank == 0:
            pair.theirs.load_state_dict(loaded(found))
        dist.barrier()


# What a stage changes, it changes for masters as for state in float32: both in stage 3, in turn in the others.
@pytest.mark.parametrize(
    ("dtype", "stage"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float32, 3), (torch.bfloat16, 3)], ids=str
)
def test_the_state_of_any_class_is_written_whole(dtype: torch.dtype, stage: int) -> None:
    run_ranks(saves_each, 3, CLASSES if dtype is torch.float32 else list(ELEMENTWISE), dtype, stage, {})


def test_it_is_asked_for_by_message() -> None:
    run_ranks(saves_each, 2, ["SGD, momentum", "NAdam", "ASGD"], torch.float32, 2, MESSAGES)


def rolls_back(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        pair = Pair(rank, world_size, name, torch.float32, stage=2)
        pair.step(0, branch=False)
        before = shared(pair.ours.full_state_dict())
        kept = copy.deepcopy(pair.ours.state_dict())
        pair.step(1, branch=True)
        pair.ours.load_state_dict(kept)
        assert same_state(shared(pair.ours.full_state_dict()), before), name


def test_a_deep_copy_of_a_class_s_state_rolls_back() -> None:
    run_ranks(rolls_back, 2, CLASSES)


def saves_masks(rank: int, world_size: int, case: masked.Case, stage: int) -> None:
    module = masked.model(case.dtype)
    optimizer = masked.optimizer_of(case, module, stage=stage, bucket_cap_mb=0.01)
    sparsity = case.sparsity(optimizer)
    for step in range(3):
        module(masked.batch(rank, world_size, step, case.dtype)).square().mean().backward()
        optimizer.step()
        sparsity.step()
        optimizer.zero_grad()
        found = saved(optimizer.state_dict()) if rank == step % world_size else b""
        whole = shared(optimizer.full_state_dict())
        assert any("mask" in state for state in whole["state"].values())
        if found:
            assert same_state(loaded(found), whole)
    kept = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(kept)
    assert same_state(shared(optimizer.full_state_dict()), whole)
    optimizer.load_state_dict(whole)
    assert same_state(shared(optimizer.full_state_dict()), whole)


CUBIC = ("cubic", 1, 7, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [masked.Case(schedule=CUBIC), masked.Case(dtype=torch.bfloat16, schedule=CUBIC, options={"state_dtype": "8bit"})],
    ids=["fp32", "bf16, 8 bits"],
)
def test_masks_are_written_whole(case: masked.Case, stage: int) -> None:
    run_ranks(saves_masks, 3, case, stage)


def with_table() -> FusedShardedAdam:
    model = nn.Sequential(nn.Embedding(300, 8, sparse=True), nn.Linear(8, 4))
    groups = [
        {"params": sparse_params(model), "sparse": True, "weight_decay": 0.0},
        {"params": list(model[1].parameters())},
    ]
    optimizer = FusedShardedAdam(groups)
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    return optimizer


def with_dtensors() -> FusedShardedAdam:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    optimizer = FusedShardedAdam(model.parameters(), process_group=mesh["dp"])
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer


def refuses(rank: int, world_size: int, make: Any) -> None:
    optimizer = make()
    share = optimizer.state_dict()
    copy.deepcopy(share)
    for what in (share, share["state"]):
        with pytest.raises(RuntimeError, match=r"this rank's share only.*consolidate_state_dict\(\) on all ranks"):
            saved(what)
    optimizer.consolidate_state_dict()
    if rank == 0:
        whole = saved(optimizer.state_dict())
        assert loaded(whole)["state"]


@pytest.mark.parametrize("make", [with_table, with_dtensors])
def test_what_one_rank_can_t_read_is_not_written_in_part(make: Any) -> None:
    run_ranks(refuses, 2, make)


def writes_shares(rank: int, world_size: int) -> None:
    with patch.dict(os.environ, {"ZEROX_STATE_PULL": "0"}):
        optimizer = with_table()
        sliced_tensor._warn_of_pickling.cache_clear()  # it warns once a process
        with pytest.warns(UserWarning, match="being pickled"):
            share = loaded(saved(optimizer.state_dict()))
        optimizer.load_state_dict(share)


def test_files_of_each_rank_have_shares_where_that_is_wanted() -> None:
    run_ranks(writes_shares, 2)


def written_before(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, "SGD, momentum", torch.float32, stage=2)
    pair.step(0, branch=True)
    for state in pair.ours.state.values():
        state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
    with pytest.raises(RuntimeError, match=r"optimizer\.state was written, and the other ranks do not know of it yet"):
        saved(pair.ours.state_dict())
    pair.ours.synchronize()
    found = saved(pair.ours.state_dict())
    assert same_state(read(found), shared(pair.ours.full_state_dict()))


def test_a_class_s_state_that_was_written_is_read_once_all_ranks_know_of_it() -> None:
    run_ranks(written_before, 2)


def never_a_mixture(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, "NAdam", torch.float32, stage=2)
    pair.step(0, branch=False)
    before = pair.ours.state_dict()
    pair.step(1, branch=True)
    with pytest.raises(RuntimeError, match=r"the state before a later step\(\)"):
        saved(before)


def test_a_class_s_state_of_before_raises() -> None:
    run_ranks(never_a_mixture, 2)


def adopts(rank: int, world_size: int) -> None:
    """A param group that comes later: its class's state begins with its first update."""
    torch.manual_seed(0)
    first, second = nn.Linear(30, 20), nn.Linear(20, 30)
    optimizer = ShardedOptimizer(first.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    first(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(second.parameters())})
    second(first(torch.ones(2, 30))).sum().backward()
    optimizer.step()
    found = saved(optimizer.state_dict())
    assert same_state(read(found), shared(optimizer.full_state_dict()))


def test_groups_that_come_later_are_read_too() -> None:
    run_ranks(adopts, 2)


def loads_in_turn(rank: int, world_size: int) -> None:
    """No rank waits for another one to show its state, and one that has loaded shows it too."""
    pair = Pair(rank, world_size, "SGD, momentum", torch.float32, stage=2)
    pair.step(0, branch=False)
    before = shared(pair.ours.full_state_dict())
    for each in range(world_size):
        if rank == each:
            pair.ours.load_state_dict(pair.ours.state_dict())
            pair.ours.state_dict()
        dist.barrier()
    assert same_state(shared(pair.ours.full_state_dict()), before)
    assert same_state(read(saved(pair.ours.state_dict())), before)


def test_ranks_load_what_they_show_one_after_the_other() -> None:
    run_ranks(loads_in_turn, 2)


def fills(rank: int, world_size: int, path: str) -> None:
    """A class that has kept nothing yet shows all that it may keep, for DCP to fill."""
    pair = Pair(rank, world_size, "NAdam", torch.float32, stage=2)
    pair.step(0, branch=True)
    expected = shared(pair.ours.full_state_dict())
    dcp.save({"optimizer": pair.ours.state_dict()}, checkpoint_id=path)
    other = Pair(rank, world_size, "NAdam", torch.float32, stage=2)
    into = {"optimizer": other.ours.state_dict()}
    dcp.load(into, checkpoint_id=path)
    other.ours.load_state_dict(into["optimizer"])
    found = shared(other.ours.full_state_dict())
    assert same_state(found, expected)


def test_dcp_fills_a_class_that_has_kept_nothing_yet(tmp_path: Path) -> None:
    run_ranks(fills, 2, str(tmp_path / "dcp"))


def passes_between_processes(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, "SGD, momentum", torch.float32, stage=2)
    pair.step(0, branch=False)
    sent = pickle.loads(bytes(ForkingPickler.dumps(pair.ours.state_dict()["state"])))
    assert {type(each["momentum_buffer"]) for each in sent.values()} == {SlicedTensor}
    whole = shared(pair.ours.full_state_dict())["state"]
    found = pickle.loads(pickle.dumps(copy.copy(pair.ours.state_dict()["state"][0])))
    assert same(found["momentum_buffer"], whole[0]["momentum_buffer"])
    dist.barrier()


def test_a_share_goes_to_another_process_and_a_file_has_all() -> None:
    run_ranks(passes_between_processes, 2)
