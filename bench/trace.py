"""Ranges that a profiler saw of a step: zerox' own, on all threads, and the phases that a benchmark marks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """``what`` as csrc/lanes/ranges.h says, or a phase's name. ``thread``: a number of the profiler's."""

    what: str
    bucket: int | None
    start_ns: int
    stop_ns: int
    thread: int


def all_threads() -> Any:
    """Makes a profiler see threads that torch did not make: without this option it sees none."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def profile_all_threads() -> profile:
    """Of the CPU."""
    return profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads())


def phase(name: str) -> record_function:
    return record_function(PHASE + name)


def ranges_of(profiled: profile) -> list[Range]:
    """By start."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    found = []
    for event in profiled.profiler.kineto_results.events():
        name = NAME.fullmatch(event.name())
        if name:
            bucket = None if name[2] is None else int(name[2])
            found.append(Range(name[1], bucket, event.start_ns(), event.end_ns(), event.start_thread_id()))
    return sorted(found, key=lambda each: each.start_ns)


def merge_chrome_traces(paths: Sequence[Path], into: Path) -> None:
    """Chrome traces of processes of one machine as one file, on one clock. Arrows between events are left out.

    Each process is called by its place in ``paths``: its rank.
    """
    traces = [json.loads(path.read_text()) for path in paths]
    first_ns = min(int(trace["baseTimeNanoseconds"]) for trace in traces)
    merged: list[dict[str, Any]] = []
    for rank, trace in enumerate(traces):
        later_us = (int(trace["baseTimeNanoseconds"]) - first_ns) / 1e3
        for event in trace["traceEvents"]:
            if event.get("ph") in ("s", "t", "f"):  # their numbers are a process' own
                continue
            if event.get("name") == "process_name":
                event["args"]["name"] = f"rank {rank}"
            if "ts" in event:
                event["ts"] += later_us
            merged.append(event)
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps({**traces[0], "baseTimeNanoseconds": first_ns, "traceEvents": merged}))
