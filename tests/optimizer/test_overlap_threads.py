"""overlap_gather() and other threads of Python's: they wait for what they read too, and run on while others wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.overlap_models import (
    Backwards,
    Compiling,
    Outside,
    batch,
    blocks_compiled,
    build,
    train_step,
)
from tests.ranks import run_ranks


def state_dict_read_on_another_thread(rank: int, _: int) -> bool:
    model, optimizer = build(Backwards, overlap=True)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    read: dict[str, Tensor] = {}
    thread = threading.Thread(target=lambda: read.update({k: v.clone() for k, v in model.state_dict().items()}))
    thread.start()
    thread.join()
    optimizer.synchronize()
    return all(torch.equal(read[name], p) for name, p in model.named_parameters())


def forward_on_another_thread(rank: int, _: int, make: Callable[[], nn.Module] = Backwards) -> bool:
    model, optimizer = build(make, overlap=True)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    out: list[Tensor] = []
    thread = threading.Thread(target=lambda: out.append(model(batch(rank, 7), 0)))
    thread.start()
    thread.join()
    optimizer.synchronize()
    return torch.equal(out[0], model(batch(rank, 7), 0))


def foreign_read_on_another_thread(rank: int, world_size: int) -> bool:
    return forward_on_another_thread(rank, world_size, Outside)


def compiled_read_on_another_thread(rank: int, world_size: int) -> bool:
    return forward_on_another_thread(rank, world_size, Compiling)


@pytest.mark.parametrize(
    "case",
    [
        state_dict_read_on_another_thread,
        forward_on_another_thread,
        foreign_read_on_another_thread,
        compiled_read_on_another_thread,
    ],
)
def test_another_thread_reads_what_is_whole(case: Callable[..., bool]) -> None:
    assert all(run_ranks(case, 2))


def longest_silence(rank: int, _: int) -> float:
    """Seconds that another thread of rank 0 stood still while a compiled forward waited for rank 1, which is late."""
    model, optimizer = build(blocks_compiled, overlap=True)
    for step in range(3):
        train_step(model, optimizer, rank, step)
    ticks = [time.monotonic()]
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 1:
        time.sleep(2)
    start = time.monotonic()
    model(batch(rank, 7), 0)
    seconds = time.monotonic() - start
    optimizer.synchronize()
    done.set()
    thread.join()
    assert rank == 1 or seconds > 1
    return max(b - a for a, b in itertools.pairwise(ticks))


def test_other_threads_run_on_while_a_compiled_forward_waits() -> None:
    assert run_ranks(longest_silence, 2)[0] < 1
