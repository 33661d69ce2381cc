"""What a deleted optimizer had lingers until no other rank may read it, and a thread frees it then."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist

from zerox import _C as C

DEADLINE_S = 20.0


def await_lingering() -> None:
    """On all ranks: until what all have deleted is freed. Those that are told by message may need a second for it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        gc.collect()  # one that a cycle keeps alive on a rank makes the others keep theirs; one pass may not free all
        num_lingering = torch.tensor(int(_lingers()))
        dist.all_reduce(num_lingering)
        if not num_lingering:
            return
        assert time.monotonic() < deadline, f"ranks that have not deleted their optimizers: {_readers()}"
        time.sleep(0.002)


def await_own_threads() -> None:
    """Until what this process has deleted is freed."""
    deadline = time.monotonic() + DEADLINE_S
    while _lingers() and time.monotonic() < deadline:
        time.sleep(0.002)


def _readers() -> list[tuple[int, list[int]]]:
    """Of all that lives in this process: which rank it is, and whom it waits for."""
    return [(each.rank, each.readers()) for each in C.Linger.all()]


def _lingers() -> bool:
    for name in Path("/proc/self/task").glob("*/comm"):
        try:
            if name.read_text() == "zerox linger\n":
                return True
        except OSError:  # it has ended
            continue
    return False
