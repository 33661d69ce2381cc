"""Stage 3 on a mesh (replicate, shard): parameters are sharded over the shard axis, and have stage 2's bits there."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerox
from tests.mesh.test_two_levels import mesh_of
from tests.mortal_ranks import start_ranks
from tests.ranks import run_ranks
from tests.residency import test_frozen, test_writes
from tests.residency.models import CASES, Case, Gpt, entropy
from tests.residency.rig import WAYS, assert_same, batch, build, by_way, residents, train, values
from zerox.residency.residency import Residency

SHAPES = [(2, 2), (2, 3), (3, 2)]


def model_of(case: Case | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Gpt() if case is None else case.model()


# ---- the same bits


# By which way a shard comes does not depend on who asks for it: an operator, its backward, a region that is fetched
# whole, or a raw read. All ask by the way that is usual, and one of each kind by the others.
FEW = ("tied weights", "checkpoints, reentrant", "functional_call", "raw reads in a forward")


def zoo(rank: int, world_size: int, way: str) -> None:
    """``two machines``: of the ranks of one replica each, so that all fetches stay inside."""
    with by_way(way, rank):
        for case in [case for name, case in CASES.items() if way == WAYS[0] or name in FEW]:

            def run(stage: int, case: Case = case) -> list[Tensor]:
                model = model_of(case)
                optimizer = build(model, stage, hostile=True, process_group=mesh_of(2, 2))
                return train(model, optimizer, rank, case.loss, case.wrap(model), steps=2)

            assert_same(run(2), run(3))


@pytest.mark.parametrize("way", WAYS)
def test_a_training_has_the_bits_of_stage_2(way: str) -> None:
    run_ranks(zoo, 4, way)


def changed(rank: int, world_size: int) -> None:
    """Frozen, added, moved and written parameters."""
    for change in test_frozen.CHANGES.values():
        found = []
        for stage in (2, 3):
            model = test_frozen.frozen_model()
            optimizer = build(model, stage, hostile=True, process_group=mesh_of(2, 2))
            train(model, optimizer, rank, entropy, steps=1)
            change(model, optimizer)
            found.append(train(model, optimizer, rank, entropy, steps=2))
        assert_same(*found)
    for write in test_writes.WRITES.values():
        found = []
        for stage in (2, 3):
            model = model_of()
            optimizer = build(model, stage, hostile=True, process_group=mesh_of(2, 2))
            train(model, optimizer, rank, entropy, steps=1)
            write(model, rank)
            found.append([*values(model), *train(model, optimizer, rank, entropy, steps=2)])
        assert_same(*found)


def test_what_is_written_and_changed_between_steps_is_as_in_stage_2() -> None:
    run_ranks(changed, 4)


def shapes(rank: int, world_size: int, shape: tuple[int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (2, 3):
        model = model_of()
        optimizer = build(model, stage, process_group=mesh_of(*shape))
        before = optimizer.inside.manager.traffic_by_axis
        found[str(stage)] = [each.tolist() for each in train(model, optimizer, rank, entropy, steps=2)]
        after = optimizer.inside.manager.traffic_by_axis
        found["sent"] = [(a - c, b - d) for (a, b), (c, d) in zip(after, before, strict=True)]
    buckets = optimizer.inside.buckets
    found["shards"] = [bucket.plan.layout.shard_numel for bucket in buckets]
    found["slices"] = [b.plan.layout.shard_numel + b.plan.layout.trailer_numel for b in buckets]
    found["kept"] = sum(each.buffer.own.nbytes for each in optimizer.inside.gather.all)
    residents(optimizer).release_all()
    found["lasting"] = optimizer.memory_bytes().parameters - residents(optimizer).room_bytes
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_keeps_and_sends_what_closed_forms_say(shape: tuple[int, int]) -> None:
    """1/G of the parameters; and of a step along the replicate axis one gather of that, and no fetch."""
    outer, inner = shape
    for found in run_ranks(shapes, outer * inner, shape):
        assert found["2"] == found["3"]
        kept = outer * sum(found["shards"]) * 4
        assert found["kept"] == found["lasting"] == kept
        num, steps = len(found["shards"]), 2
        inside, between = found["sent"]
        assert inside == (steps * (inner - 1) * num, steps * (inner - 1) * outer * sum(found["slices"]) * 4)
        sums, gathered = (outer - 1) * sum(found["slices"]) * 4, (outer - 1) * sum(found["shards"]) * 4
        assert between == (steps * 2 * (outer - 1) * num, steps * (sums + gathered))


def sums_wait(rank: int, world_size: int) -> None:
    """no_sync(outer=True) is stage 2's."""
    found = []
    for stage in (2, 3):
        model = model_of()
        optimizer = build(model, stage, hostile=True, process_group=mesh_of(2, 2))
        for step in range(2):
            with optimizer.no_sync(outer=True):
                entropy(model, batch(step, rank)).backward()
            entropy(model, batch(step + 10, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
    assert_same(*found)


def test_sums_may_wait_on_the_shard_axis() -> None:
    run_ranks(sums_wait, 4)


def slow_update(rank: int, world_size: int) -> None:
    """A rank that is late with one bucket after the other: nobody reads the last step's."""
    publish = Residency.start

    def late(self: Residency, index: int, background: bool = False) -> None:
        time.sleep(0.01 * rank)
        publish(self, index, background)

    found = []
    with patch.object(Residency, "start", late):
        for stage in (2, 3):
            model = model_of()
            found.append(train(model, build(model, stage, process_group=mesh_of(2, 2)), rank, entropy))
    assert_same(*found)


def test_a_rank_that_updates_late_is_waited_for() -> None:
    run_ranks(slow_update, 4)


def written_on_one_machine(rank: int, world_size: int) -> str:
    """Ranks 0 and 1 write, and wait for the others, who share no parameters with them."""
    model = model_of()
    mesh = mesh_of(2, 2)
    optimizer = build(model, hostile=True, process_group=mesh)
    said = ""
    if rank < 2:
        try:
            with torch.no_grad():
                model.get_parameter("embedding.weight").mul_(2)
        except RuntimeError as error:
            said = str(error)
    try:
        optimizer.step()
    except RuntimeError as error:
        said = said or str(error)
    return said


def test_a_write_on_one_machine_only_raises(tmp_path: Path) -> None:
    run = start_ranks(written_on_one_machine, 4, timeout_s=3, folder=tmp_path / "run")
    try:
        for rank in range(4):
            said = run.answer(rank, within_s=60)
            assert "embedding.weight" in said, said
            assert re.search(r"were written on rank [01] and not on all ranks", said), said
    finally:
        run.close()


# ---- checkpoints


def saved(rank: int, world_size: int, folder: str) -> list[Tensor]:
    model = model_of()
    optimizer = build(model, process_group=mesh_of(2, 2))
    train(model, optimizer, rank, entropy, steps=2)
    zerox.save(folder, model, optimizer)
    with optimizer.whole():
        return values(model)


def loaded(rank: int, world_size: int, folder: str, stage: int, shape: tuple[int, int] | None) -> list[Tensor]:
    model = model_of()
    mesh = None if shape is None else mesh_of(*shape)
    optimizer = build(model, stage, process_group=mesh)
    train(model, optimizer, rank, entropy, steps=1)
    zerox.load(folder, model, optimizer)
    zerox.save(f"{folder} again", model, optimizer)
    with optimizer.whole():
        return values(model)


@pytest.mark.parametrize(("world_size", "stage", "shape"), [(4, 3, (2, 2)), (6, 3, (2, 3)), (4, 2, None), (1, 3, None)])
def test_a_checkpoint_goes_to_other_meshes_and_back(
    tmp_path: Path, world_size: int, stage: int, shape: tuple[int, int] | None
) -> None:
    first, *_ = run_ranks(saved, 4, str(tmp_path / "x"))
    for found in run_ranks(loaded, world_size, str(tmp_path / "x"), stage, shape):
        assert_same(found, first)
    for found in run_ranks(loaded, 4, str(tmp_path / "x again"), 3, (2, 2)):
        assert_same(found, first)


def whole_state(rank: int, world_size: int) -> None:
    """full_state() and its setter, and what is written inside whole()."""
    found = []
    for stage in (2, 3):
        model = model_of()
        optimizer = build(model, stage, hostile=True, process_group=mesh_of(2, 2), master_weights="fp32")
        train(model, optimizer, rank, entropy, steps=1)
        with optimizer.whole(), torch.no_grad():
            model.get_parameter("norm.weight").mul_(2)
        param = model.get_parameter("blocks.0.up.weight")
        state = optimizer.full_state(param)
        optimizer.set_full_state_(param, exp_avg=state["exp_avg"] * 2)
        found.append(train(model, optimizer, rank, entropy, steps=1))
    assert_same(*found)
    dist.barrier()


def test_whole_and_full_state_are_as_in_stage_2() -> None:
    run_ranks(whole_state, 4)


def test_the_mesh_is_made_with_names_or_without() -> None:
    run_ranks(nameless, 4)


def nameless(rank: int, world_size: int) -> None:
    model = model_of()
    optimizer = build(model, process_group=init_device_mesh("cpu", (2, 2)))
    train(model, optimizer, rank, entropy, steps=1)
    assert len(optimizer.inside.gather.members) == 2
