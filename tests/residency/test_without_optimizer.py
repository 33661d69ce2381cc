"""Sharded parameters whose optimizer was deleted: they are read as before, handed over to a new one, or made whole."""

from __future__ import annotations

import gc
import io
import time
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from tests.residency.models import Gpt, entropy
from tests.residency.rig import (
    WAYS,
    assert_as_in_stage_2,
    assert_same,
    batch,
    build,
    made,
    residents,
    run_by_way,
    train,
    values,
)
from zerox import _C as C
from zerox import FusedShardedAdam, FusedShardedSGD

LIMIT = 0.02  # MiB


def left_with(model: nn.Module) -> C.Residency:
    found = C.Residency.left_with(next(model.parameters()))
    assert found is not None
    return found


def deleted(rank: int, world_size: int) -> None:
    model, optimizer = made(resident_mb=LIMIT)
    train(model, optimizer, rank, entropy)
    with torch.no_grad():
        loss, expected = entropy(model, batch(9, rank)), values(model)
    residents(optimizer).take_most_bytes()
    entropy(model, batch(9, rank)).backward()
    most = residents(optimizer).take_most_bytes()
    optimizer.zero_grad()
    residents(optimizer).release_all()
    state = weakref.ref(next(iter(optimizer.state_dict()["state"].values()))["exp_avg"].untyped_storage())
    fetches, bytes_before = residents(optimizer).counts.fetches, C.room_bytes()
    optimizer_gone = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    assert (optimizer_gone(), state()) == (None, None), "no garbage collector is needed"
    gc.enable()
    left = left_with(model)
    assert left.counts.fetches == fetches, "deletion fetches nothing"
    assert C.room_bytes() <= bytes_before
    assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in model.parameters())

    if rank == 0:  # a rank alone, as before
        with torch.no_grad():
            assert_same([entropy(model, batch(9, rank))], [loss])
        assert left.resident_bytes <= LIMIT * 2**20
        kept = io.BytesIO()
        torch.save(model.state_dict(), kept)
        kept.seek(0)
        assert_same(torch.load(kept).values(), dict(model.state_dict()).values())
        assert float(next(model.parameters()).detach().numpy().sum()) == float(expected[0].numpy().sum())
    dist.barrier()
    assert_same(values(model), expected)
    left.take_most_bytes()
    entropy(model, batch(9, rank)).backward()
    assert left.take_most_bytes() <= most
    assert all(param.grad is not None and param.grad.shape == param.shape for param in model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # on all ranks, as before
    assert_same(values(model), [2 * value for value in expected])
    dist.barrier()


@pytest.mark.parametrize(("way", "world_size"), [("memory", 2), ("messages", 2), ("two machines", 4)])
def test_a_model_whose_optimizer_was_deleted_is_read_as_before(way: str, world_size: int) -> None:
    run_ranks(run_by_way, world_size, way, deleted)


def all_gone(rank: int, world_size: int) -> None:
    gc.collect()  # what tests before have left
    before = C.room_bytes()
    for order in ("optimizer first", "model first"):
        model, optimizer = made()
        train(model, optimizer, rank, entropy)
        view = model.head.weight.detach()[1:]
        expected = view.clone()
        gone = weakref.ref(residents(optimizer))
        if order == "optimizer first":
            del optimizer
            del model
        else:
            del model
            del optimizer
        gc.collect()
        dist.barrier()
        assert torch.equal(view, expected), "a view of one parameter keeps what it takes to read it"
        dist.barrier()
        del view
        assert gone() is None
        dist.barrier()
        assert C.room_bytes() == before


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_the_last_tensor_takes_it_along(way: str) -> None:
    run_ranks(run_by_way, 2, way, all_gone)


def again(rank: int, world_size: int, way_of_layout: str) -> None:
    """A second optimizer after the first, which has gone; and a third."""

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage, hostile=True)
        seen = train(model, optimizer, rank, entropy)
        if stage == 3:
            shards = [each.buffer.own.data_ptr() for each in optimizer.inside.gather.all]
            residents(optimizer).release_all()
            fetches, bytes_before = residents(optimizer).counts.fetches, C.room_bytes()
        del optimizer
        options: dict[str, Any] = {} if way_of_layout == "the same" else {"bucket_cap_mb": 0.5}
        if stage == 3:
            left = left_with(model)
            C.most_room_bytes()
        second = build(model, stage, **options)
        if stage == 3 and way_of_layout == "the same":
            assert left.counts.fetches == fetches, "nothing was fetched"
            assert C.most_room_bytes() <= bytes_before, "no bucket was whole"
            assert [each.buffer.own.data_ptr() for each in second.inside.gather.all] == shards
            assert not any(residents(second).resident)
        seen += values(model)
        seen += train(model, second, rank, entropy)
        del second
        third = FusedShardedSGD(model.named_parameters(), lr=1e-2, momentum=0.9, stage=stage, bucket_cap_mb=0.005)
        seen += train(model, third, rank, entropy)  # type: ignore[arg-type]
        return seen

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("layout", ["the same", "another"])
@pytest.mark.parametrize(("way", "world_size"), [("memory", 2), ("memory", 3), ("messages", 2), ("two machines", 4)])
def test_a_new_optimizer_takes_the_shards_over(way: str, world_size: int, layout: str) -> None:
    run_ranks(run_by_way, world_size, way, again, layout)


def on_a_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage, hostile=True, process_group=mesh)
        seen = train(model, optimizer, rank, entropy)
        shards = [each.buffer.own.data_ptr() for each in optimizer.inside.gather.all] if stage == 3 else []
        del optimizer
        second = build(model, stage, process_group=mesh)
        assert stage == 2 or [each.buffer.own.data_ptr() for each in second.inside.gather.all] == shards
        return [*seen, *values(model), *train(model, second, rank, entropy)]

    assert_as_in_stage_2(run)


def test_ranks_of_a_mesh_take_their_shards_over() -> None:
    run_ranks(on_a_mesh, 4)


def in_part(rank: int, world_size: int) -> None:
    """Some buckets are taken over: others' parameters moved, on one rank, and some stay without an optimizer."""

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage, hostile=True)
        seen = train(model, optimizer, rank, entropy)
        del optimizer
        if rank == 0:
            model.blocks[1].up.weight.data = model.blocks[1].up.weight.detach().clone()
        others = [(name, param) for name, param in model.named_parameters() if not name.startswith("blocks.0")]
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        one = FusedShardedAdam(others, lr=1e-2, stage=stage, bucket_cap_mb=0.005)
        seen += [*train(model, one, rank, entropy)]
        model.blocks[0].requires_grad_(True)
        two = FusedShardedAdam(model.blocks[0].parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.005)
        for step in range(2):
            entropy(model, batch(step, rank)).backward()
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
        return [*seen, *values(model)]

    assert_as_in_stage_2(run)


def test_what_fits_is_taken_over_and_the_rest_is_laid_out_anew() -> None:
    run_ranks(in_part, 2)


def refused(rank: int, world_size: int) -> None:
    model, optimizer = made()
    seen = train(model, optimizer, rank, entropy)[3:]
    del optimizer
    with pytest.raises(ValueError, match="resident_mb"):
        build(model, resident_mb=1e-4)
    assert_same(values(model), seen)
    second = build(model)
    assert_same(values(model), seen)
    del second
    assert_same(values(model), seen)
    dist.barrier()


def test_a_constructor_that_raises_leaves_the_shards_where_they_are() -> None:
    run_ranks(refused, 2)


def gone_with_one_ahead(rank: int, world_size: int) -> None:
    for step in range(25):
        model, optimizer = made(resident_mb=LIMIT)
        train(model, optimizer, rank, entropy, steps=1)
        with torch.no_grad():
            entropy(model, batch(step, rank))
        del model, optimizer
    dist.barrier()


def test_a_model_may_go_while_a_bucket_is_fetched_ahead() -> None:
    run_ranks(run_by_way, 2, "messages", gone_with_one_ahead)


# ---- unshard()


def unsharded(rank: int, world_size: int) -> None:
    model, optimizer = made(hostile=True, resident_mb=LIMIT)
    seen = train(model, optimizer, rank, entropy)[3:]
    state = optimizer.full_state_dict().get("state", {})
    around, error = (optimizer.whole(), RuntimeError) if rank == 1 else (nullcontext(), ValueError)
    with around, pytest.raises(error, match=r"inside optimizer\.whole"):
        optimizer.unshard()
    optimizer.unshard()
    optimizer.unshard()
    assert optimizer.memory_bytes().parameters >= sum(param.nbytes for param in model.parameters())
    entropy(model, batch(0, rank)).backward()
    with pytest.raises(RuntimeError, match="build a new optimizer"):
        optimizer.step()
    with optimizer.whole():
        assert_same(values(model), seen)
    for key, value in optimizer.full_state_dict().get("state", {}).items():
        assert torch.equal(value["exp_avg"], state[key]["exp_avg"])
    assert C.Residency.left_with(model.head.weight) is None
    if rank == 0:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()  # this rank's alone now
    dist.barrier()
    if rank == 1:
        assert_same(values(model), seen)
    del optimizer
    dist.barrier()
    build(model)  # with rank 0's values
    assert all(not value.any() for value in values(model))
    dist.barrier()


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_unshard_makes_whole_for_good(way: str) -> None:
    run_ranks(run_by_way, 2, way, unsharded)


def elsewhere(rank: int, world_size: int) -> None:
    model, optimizer = made(2)
    optimizer.unshard()
    train(model, optimizer, rank, entropy)


def test_unshard_changes_nothing_in_other_stages() -> None:
    run_ranks(elsewhere, 2)


# ---- an owner that has ended


def owner_ends(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = build(model, hostile=True)
    train(model, optimizer, rank, entropy)
    del optimizer
    dist.barrier()
    if rank == 1:
        del model
        gc.collect()
        time.sleep(1)  # its shards are read until all have let go of theirs
        return ""
    expected = values(model)
    time.sleep(0.2)
    assert_same(values(model), expected)
    return ""


@pytest.mark.parametrize("way", WAYS[:2])
def test_shards_are_there_as_long_as_another_rank_reads_them(way: str) -> None:
    run_ranks(run_by_way, 2, way, owner_ends)


def in_the_air(rank: int, world_size: int) -> None:
    """Rank 0 deletes its optimizer while gradients are on their way from rank 1, whose backward comes later."""
    model, optimizer = made(hostile=True)
    train(model, optimizer, rank, entropy)
    expected = values(model)
    dist.barrier()
    if rank == 1:
        time.sleep(1)
    entropy(model, batch(0, rank)).backward()
    del optimizer
    assert_same(values(model), expected)
    dist.barrier()
    assert_same(values(model), expected)
    dist.barrier()


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_deletion_with_gradients_on_their_way_leaves_parameters_to_be_read(way: str) -> None:
    run_ranks(run_by_way, 2, way, in_the_air)
