"""Ranges that a profiler saw of a step: zerox' own, on all threads, and the phases that a benchmark marks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

PHASE = "phase::"
# The kernels of csrc/cuda: as a demangler shows their names, and as the compiler writes them.
KERNEL = re.compile(r"(?:\bzx::cuda::(?:[^:<]*::)?|2zx4cuda\w*?\d)([a-z][a-z_]*)_kernel")
NAME = re.compile(rf"(?:zerox|{PHASE[:-2]})::(?!norm_value)(\w*[^\W_])(?: bucket (\d+))?")  # no ops: others end in _


@dataclass(frozen=True)
class Range:
    """``what`` as csrc/workers/ranges.h says, or a phase's name. ``thread``: a number of the profiler's."""

    what: str
    bucket: int | None
    start_ns: int
    stop_ns: int
    thread: int


def profile_all_threads(cuda: bool = False) -> profile:
    """Sees threads that torch did not make, too, and with ``cuda`` the device's streams."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    option = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, experimental_config=option)


def phase(name: str) -> record_function:
    return record_function(PHASE + name)


def events_of(profiled: profile) -> list[Any]:
    """Kineto's."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return profiled.profiler.kineto_results.events()


def ranges_of(profiled: profile) -> list[Range]:
    """By start."""
    found = []
    for event in events_of(profiled):
        name = NAME.fullmatch(event.name())
        if name:
            bucket = None if name[2] is None else int(name[2])
            found.append(Range(name[1], bucket, event.start_ns(), event.end_ns(), event.start_thread_id()))
    return sorted(found, key=lambda each: each.start_ns)
