"""The least time that a kernel can take on a GPU, for its instructions: what beside its bytes holds it.

How many a kernel issues for an element is counted in its machine code (scripts/kernel_work.py); how many clocks a
second the device makes is measured, since no two runs need have the same.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.common import ROOT
from bench.jobs import Job

COUNTED_FOR = (9, 0)  # compute capability
CYCLES = 20_000_000


@cache
def work() -> dict[str, dict[str, Any]]:
    """Of an element of each job: instructions, and clocks of a multiprocessor that can do no more at a time."""
    found: dict[str, dict[str, Any]] = json.loads((ROOT / "bench/kernel_work.json").read_text())["an_element"]
    return found


def name_of(job: Job) -> str:
    return ", ".join([job.title, job.kind.name, *([job.kind.state] if job.op == "adam" else [])])


@dataclass(frozen=True)
class Gpu:
    """``clock_hz``: of its multiprocessors."""

    processors: int
    clock_hz: float

    def instructions_ms(self, job: Job) -> float:
        return job.numel * float(work()[name_of(job)]["clocks"]) / (self.processors * self.clock_hz) * 1e3


def gpu_of(device: torch.device) -> Gpu | None:
    """None for a CPU, and for a GPU that runs other machine code than was counted."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != COUNTED_FOR:
        return None
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples_ms = []
    for _ in range(5):
        start.record()
        torch.cuda._sleep(CYCLES)
        stop.record()
        stop.synchronize()
        samples_ms.append(start.elapsed_time(stop))
    clock_hz = CYCLES / statistics.median(samples_ms) * 1e3
    return Gpu(torch.cuda.get_device_properties(device).multi_processor_count, clock_hz)
