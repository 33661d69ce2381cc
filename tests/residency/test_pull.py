"""Fetches ask nothing of other ranks but their memory: no order, no answer, and an error where a rank is gone."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import same_bits
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks, run_threads
from tests.residency.models import RawKernels, entropy
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
from zerox.residency.residency import Residency


def evaluate_alone(rank: int, world_size: int, other: str) -> float:
    """How long rank 0 needs for an evaluation while rank 1 does something else for a second."""
    model, optimizer = made(hostile=True)
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        with torch.no_grad():
            for step in range(5):
                entropy(model, batch(step, rank))
        took = time.perf_counter() - start
    elif other == "sleeps":
        time.sleep(1)
    else:  # holds the GIL
        ctypes.PyDLL(None).usleep(999_999)
    fetches = residents(optimizer).counts.fetches
    dist.barrier()
    train(model, optimizer, rank, entropy, steps=1)
    return took if rank == 0 and fetches > 50 else 0.0


@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize("other", ["sleeps", "holds the GIL"])
def test_a_rank_is_read_whatever_it_does(other: str, way: str) -> None:
    took, _ = run_ranks(run_by_way, 2, way, evaluate_alone, other)
    assert 0 < took < 0.5


def branches(rank: int, world_size: int) -> None:
    """Ranks read other blocks, in other orders, and other numbers of times."""

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage, hostile=True)
        found = []
        for step in range(3):
            x = model.embedding(batch(step, rank))
            for index in ([0, 1, 2, 1], [2, 0])[rank]:
                x = model.blocks[index](x)
            model.head(model.norm(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == step % 2:
                with torch.no_grad():
                    found.append(entropy(model, batch(step, 7)))
        return [*found, *values(model)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_branches_that_differ_over_ranks(way: str) -> None:
    run_ranks(run_by_way, 2, way, branches)


def slow_update(rank: int, world_size: int) -> None:
    """A rank that is late with one bucket after the other: nobody reads the last step's."""
    publish = Residency.start

    def late(self: Residency, index: int, background: bool = False) -> None:
        time.sleep(0.01 * rank)
        publish(self, index, background)

    with patch.object(Residency, "start", late):
        assert_as_in_stage_2(lambda stage: train(*made(stage), rank, entropy))


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_rank_that_updates_late_is_waited_for(way: str) -> None:
    run_ranks(run_by_way, 2, way, slow_update)


def call_a_function(group: dist.ProcessGroup) -> list[Tensor]:
    """A function in Python, which is called with the GIL, reads what another rank has still to publish."""
    torch.manual_seed(0)
    model = RawKernels()
    optimizer = build(model, process_group=group, bucket_cap_mb=0.002)  # the function's parameter has one of its own
    return train(model, optimizer, group.rank(), entropy, steps=5)


def test_a_rank_that_waits_for_another_one_does_so_without_the_gil() -> None:
    """Ranks are threads of this process: the one that is late needs the GIL to go on."""
    publish = Residency.start

    def late(self: Residency, index: int, background: bool = False) -> None:
        time.sleep(0.02 * self.ranks.rank)
        publish(self, index, background)

    with patch.object(Residency, "start", late):
        first, second = run_threads(call_a_function, 2, timeout_s=10)
    assert_same(first[-2:], second[-2:])


def read_on_a_thread(rank: int, world_size: int) -> None:
    """A thread that evaluates all the time, also while its rank and the others step: it never finds a torn bucket.

    All elements of a parameter are alike before and after each step.
    """
    model = torch.nn.Linear(256, 256, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = build(model, hostile=True, bucket_cap_mb=1)
    torn, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            least, most = torch.aminmax(model.weight.detach())
            if least != most:
                torn.append((float(least), float(most)))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(50):
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stop.set()
    thread.join()
    assert not torn


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_no_thread_reads_a_shard_while_its_owner_writes_it(way: str) -> None:
    run_ranks(run_by_way, 2, way, read_on_a_thread)


def opposite_orders(rank: int, world_size: int) -> None:
    """Two optimizers, whose backwards each rank runs in another order: neither rank waits for the other's first."""

    def run(stage: int) -> list[Tensor]:
        (first, one), (second, other) = made(stage), made(stage)
        losses = [entropy(model, batch(0, rank)) for model in ((first, second) if rank else (second, first))]
        (losses[0] + losses[1]).backward()
        one.step()
        other.step()
        return [*values(first), *values(second)]

    assert_as_in_stage_2(run)


def test_backwards_in_other_orders_on_other_ranks_end() -> None:
    run_ranks(opposite_orders, 2)


def gone(rank: int, world_size: int, place: str, how: signal.Signals) -> tuple[str, str]:
    model, optimizer = made(hostile=True)
    train(model, optimizer, rank, entropy, steps=1)
    dist.barrier()  # all have read what it left
    if rank == 1 and place == "forward":
        model.norm.register_forward_pre_hook(lambda *_: fail_now(how))
    if rank == 1 and place == "update":
        Residency.start = lambda *_, **__: fail_now(how)  # type: ignore[method-assign, assignment]
    if place == "update":
        entropy(model, batch(0, rank)).backward()
        optimizer.step()
    before = [bucket.param_shard.clone() for bucket in optimizer.inside.buckets]
    said = []
    try:
        for step in range(1000):
            entropy(model, batch(step, rank))
    except RuntimeError as error:
        said.append(str(error))
    try:
        optimizer.step()
    except RuntimeError as error:
        said.append(str(error))
    for bucket, shard in zip(optimizer.inside.buckets, before, strict=True):
        assert same_bits(bucket.param_shard, shard)
    fetch, step_ = said
    return fetch, step_


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("place", "how", "reason"),
    [
        ("forward", signal.SIGKILL, "rank 1 is gone"),
        ("update", signal.SIGKILL, "rank 1 is gone"),
        ("update", signal.SIGSTOP, "rank 1 did not come within 3 s"),
    ],
)
def test_a_rank_that_dies_or_stops_is_named_by_those_that_fetch(
    place: str, how: signal.Signals, reason: str, way: str, tmp_path: Path
) -> None:
    ranks = start_ranks(run_by_way, 3, way, gone, place, how, folder=tmp_path / "ranks", timeout_s=3)
    try:
        for rank in (0, 2):
            fetch, step = ranks.answer(rank, within_s=60)
            assert "the parameters of bucket" in fetch
            assert reason in fetch
            assert "rank 1" in step
            ranks.processes[rank].join(30)
            assert ranks.processes[rank].exitcode == 0
    finally:
        ranks.close()
