"""Optimizers that come and go leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.allocator import Allocator, build
from tests.lingering import await_lingering, await_own_threads
from tests.ranks import run_ranks, run_threads
from zerox import FusedShardedAdam

ROUNDS = 60
WARM_UP = 20  # rounds until torch has made what it makes once
# Of the process: the allocator of C and the interpreter keep free lists of their own. A layer, which is a bucket, has
# 512 KiB: rounds that lost one, of parameters or of state, would have lost 30 MiB.
RESIDENT_GROWTH = 16 * 2**20
LIBC = ctypes.CDLL(None)  # once: each of these is 11 objects in a reference cycle


@dataclass
class Holdings:
    """What a process holds."""

    allocated: int
    threads: int
    files: int
    objects: int
    resident: int

    @staticmethod
    def now(allocator: Allocator) -> Holdings:
        LIBC.malloc_trim(0)  # of all threads' free lists
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Holdings(
            allocated=allocator.now,
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            objects=len(gc.get_objects()),
            resident=pages * os.sysconf("SC_PAGE_SIZE"),
        )


def one_round(group: dist.ProcessGroup | None, model: nn.Module, index: int) -> weakref.ref[FusedShardedAdam]:
    """Of each kind some: in both stages, deleted with work under way, with gradients left, after a whole step."""
    optimizer = FusedShardedAdam(model.named_parameters(), process_group=group, stage=1 + index % 2, bucket_cap_mb=0.1)
    model(torch.ones(1, 256)).sum().backward()
    if index % 3 or group is not None:  # ranks as threads share one group: nothing may stay under way in it
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    if index % 5:
        optimizer.zero_grad()
    return weakref.ref(optimizer)


def rounds(group: dist.ProcessGroup | None, count: int) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    for index in range(count):
        assert one_round(group, model, index)() is None, "a reference cycle keeps the optimizer alive"
        model.zero_grad()


def many_rounds(_: int, __: int, library: Path, num_threads: int) -> tuple[Holdings, Holdings]:
    """What this process holds after the first few and after all. ``num_threads``: ranks as threads of this process."""
    allocator = Allocator(library)
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer of a process stays in frames of torch's lazy imports

    def run(count: int) -> Holdings:
        if num_threads:
            run_threads(rounds, num_threads, count)
        else:
            rounds(None, count)
        await_own_threads()  # without a collection
        return Holdings.now(allocator)

    gc.collect()
    gc.disable()  # what is in a reference cycle stays, and is counted
    try:
        return run(WARM_UP), run(ROUNDS)
    finally:
        gc.enable()


@pytest.mark.parametrize(("world_size", "num_threads"), [(1, 0), (2, 0), (1, 2)])
def test_optimizers_that_come_and_go_leave_nothing(world_size: int, num_threads: int) -> None:
    for before, after in run_ranks(many_rounds, world_size, build(), num_threads):
        assert after.allocated == before.allocated
        for kind in ("threads", "files", "objects"):  # a thread that has been joined may still be there for a moment
            assert getattr(after, kind) - getattr(before, kind) < ROUNDS / 10, kind
        assert after.resident - before.resident < RESIDENT_GROWTH


def delete(rank: int, world_size: int, library: Path, stage: int, moment: str) -> list[int]:
    """Bytes beyond the buffers that parameters lie in when the optimizer, all but one parameter, and all are gone."""
    allocator = Allocator(library)
    gc.collect()
    await_lingering()
    base = allocator.now
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 300)).bfloat16()
    optimizer = FusedShardedAdam(model.parameters(), stage=stage, bucket_cap_mb=0.1)
    model(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
    if moment == "after a step":
        optimizer.step()
        optimizer.zero_grad()
    elif moment == "after backward":
        optimizer.synchronize()
    buffers = [bucket.buffer.flat.nbytes for bucket in optimizer.inside.buckets]
    del optimizer
    await_lingering()
    model.zero_grad()  # stage 1 leaves gradients that are the user's
    beyond = [allocator.now - base - sum(buffers)]
    last = model[0].weight.data  # the one of the first layer's bucket: it comes last
    del model
    beyond.append(allocator.now - base - buffers[-1])
    del last
    return [*beyond, allocator.now - base]


@pytest.mark.parametrize("moment", ["after a step", "after backward"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_deletion_leaves_the_parameters_and_nothing_else(world_size: int, stage: int, moment: str) -> None:
    assert run_ranks(delete, world_size, build(), stage, moment) == [[0, 0, 0]] * world_size
