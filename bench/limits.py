"""What a kernel can reach at most on a device, beside which its time is shown.

The roof is what memory gives to simple work on large tensors. An update reads four arrays and writes three of them in
place; what the memory of a CPU gives such a loop depends on its shape, so its ceiling is a loop that moves as many
bytes in the same shape and computes nothing. On a GPU instructions hold a kernel beside its bytes. How many a kernel
issues for an element is counted in its machine code (scripts/kernel_table.py); how many clocks a second the device
makes is measured, since no two runs need have the same.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.common import ROOT, library
from bench.timing import time_in_turn


def roof_gb_per_s(device: torch.device, numel: int, budget_s: float) -> float:
    """Read and written, for large fp32 tensors: a copy's rate on a GPU.

    On the CPU a copy reads its target too, unseen. There an addition in place is what an update looks like.
    """
    source, target = (torch.randn(numel, device=device) for _ in range(2))
    if device.type == "cuda":
        call, accesses = lambda _: target.copy_(source), 2
    else:
        call, accesses = lambda _: target.add_(source), 3
    timing = time_in_turn({"roof": call}, 1, device, budget_s)["roof"]
    return accesses * source.nbytes / timing.p50_ms / 1e6


# ---- the loop in an update's shape, on the CPU

STAGGER = 8192 // 4  # elements between the starts of neighbours, modulo more than that
PAGE = 4096
PERIOD = 16 * PAGE


class Stream:
    """Moves ``nbytes`` with each call: of ``in_place`` fp32 arrays, which are read and written, and one that is read.
    Raises OSError or CalledProcessError where it can't be compiled.

    They start on different pages: where streams cross into new pages together, they wait together.
    """

    def __init__(self, nbytes: int, in_place: int = 3) -> None:
        made = library(ROOT / "bench/stream_ceiling.cpp", ("-O3", "-march=native", "-fopenmp"))
        self.function = ctypes.CDLL(str(made))
        self.numel = nbytes // (4 * (2 * in_place + 1))
        room = self.numel + 4 * STAGGER + PERIOD // 4
        self.rooms = [torch.zeros(room) for _ in range(in_place + 1)]
        starts = [-(-each.data_ptr() // PERIOD) * PERIOD + place * STAGGER * 4 for place, each in enumerate(self.rooms)]
        unused = [None] * (3 - in_place)
        self.arguments = [*(ctypes.c_void_p(start) for start in (*starts, *unused)), ctypes.c_int64(self.numel)]

    def __call__(self) -> None:
        self.function.update_shaped_stream(*self.arguments)


# ---- instructions, on a GPU

COUNTED_FOR = (9, 0)  # compute capability
CYCLES = 20_000_000


@cache
def work() -> dict[str, dict[str, Any]]:
    """Of an element of each job: instructions, and clocks of a multiprocessor that can do no more at a time."""
    found: dict[str, dict[str, Any]] = json.loads((ROOT / "bench/kernel_work.json").read_text())["an_element"]
    return found


@dataclass(frozen=True)
class Gpu:
    """``clock_hz``: of its multiprocessors."""

    processors: int
    clock_hz: float

    def instructions_ms(self, job: str, numel: int) -> float:
        """``job``: a key of work()."""
        return numel * float(work()[job]["clocks"]) / (self.processors * self.clock_hz) * 1e3


def gpu_of(device: torch.device) -> Gpu | None:
    """None for a CPU, and for a GPU that runs other machine code than was counted."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != COUNTED_FOR:
        return None
    slept = time_in_turn({"sleep": lambda _: torch.cuda._sleep(CYCLES)}, 1, device, budget_s=0.0)["sleep"]
    clock_hz = CYCLES / slept.p50_ms * 1e3
    return Gpu(torch.cuda.get_device_properties(device).multi_processor_count, clock_hz)
