"""What bench.against has one checkout do on every rank: it trains, times, weighs and counts.

    python -m bench.against_work '{"ranks": 2, ...}'

with a zerox in front of the path, of which it knows public names and the manager's traffic. The last line that it
prints is the numbers, as JSON: counts are rank 0's, times and bytes the largest of all ranks.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerox
from bench.allocator import Allocator
from bench.common import Spread, largest, on_ranks
from bench.systems import Training, Zerox, ZeroxStage1
from bench.trace import profile_all_threads
from zerox import FusedShardedAdam

SMALL = 16  # elements of each of many parameters
WARM_UP = 3
Numbers = dict[str, float]


@dataclass(frozen=True)
class Work:
    """``steps`` of ``training`` are timed, and as many of ``num_small`` parameters; ``zerox``: where it has to lie."""

    ranks: int
    zerox: str
    allocator: str
    stages: tuple[int, ...] = (1, 2)
    steps: int = 10
    num_small: int = 1_000
    training: Training = field(default_factory=lambda: Training(layers=2, vocabulary=8_192, max_norm=1.0))


def steps_of(work: Work, stage: int) -> tuple[Zerox, Callable[[], None]]:
    """What is trained, and what makes its next step."""
    system = {1: ZeroxStage1, 2: Zerox}[stage](work.training)
    indices = itertools.count()
    return system, lambda: system.step(work.training.batches(next(indices), dist.get_rank()))


def times(work: Work, stage: int) -> Numbers:
    """Medians over the steps, of the slowest rank each."""
    _, step = steps_of(work, stage)
    step_ms = []
    for _ in range(WARM_UP + work.steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        step_ms.append((time.perf_counter() - start) * 1e3)
    return {"step_ms": statistics.median(largest(step_ms)[WARM_UP:]), **small_times(work, stage)}


def small_times(work: Work, stage: int) -> Numbers:
    """Host work: of hooks, which run in backward, and of step(), once what backward sent has arrived."""
    params = [nn.Parameter(torch.ones(SMALL)) for _ in range(work.num_small)]
    optimizer = FusedShardedAdam(params, stage=stage)
    samples: list[list[float]] = [[], [], []]
    for _ in range(WARM_UP + 3 * work.steps):
        loss = Spread.apply([torch.ones(SMALL) for _ in params], *params)
        dist.barrier()
        clock = [time.perf_counter()]
        loss.backward()
        clock.append(time.perf_counter())
        optimizer.synchronize()
        dist.barrier()
        between = time.perf_counter()
        optimizer.step()
        clock.append(clock[-1] + time.perf_counter() - between)
        between = time.perf_counter()
        optimizer.zero_grad()
        clock.append(clock[-1] + time.perf_counter() - between)
        for sample, start, stop in zip(samples, clock, clock[1:], strict=False):
            sample.append((stop - start) * 1e6)
    names = ("backward_us", "small_step_us", "zero_grad_us")
    return {name: statistics.median(largest(sample)[WARM_UP:]) for name, sample in zip(names, samples, strict=True)}


def counts(work: Work, stage: int, allocator: Allocator) -> Numbers:
    """Of a step: bytes at most (the largest rank's), and how many of what this rank did."""
    base = allocator.now
    system, step = steps_of(work, stage)

    def run() -> None:
        for _ in range(WARM_UP):
            step()

    run()
    manager = manager_of(system.ours)
    allocations, sent = allocator.num_allocations, manager.traffic
    [peak] = largest([float(allocator.peak_of(run) - base)])
    found = {"peak_bytes": peak, "allocations": (allocator.num_allocations - allocations) / WARM_UP}
    for name, now, before in zip(("messages", "sent_bytes"), manager.traffic, sent, strict=True):
        found[name] = (now - before) / WARM_UP
    return {**found, "copies": float(copies_of(step))}


def manager_of(optimizer: Any) -> Any:
    """Commits before there was ``inside`` have it under another name."""
    return optimizer.inside.manager if hasattr(optimizer, "inside") else optimizer._grads.manager


def copies_of(function: Any) -> int:
    """Operators that copy, on all threads."""
    with profile_all_threads() as profiled:
        function()
    return sum(event.count for event in profiled.key_averages() if event.key in ("aten::copy_", "zerox::flatten_"))


def run(work: Work) -> dict[str, Numbers]:
    """By stage. On each rank."""
    if not Path(zerox.__file__).resolve().is_relative_to(Path(work.zerox).resolve()):
        raise RuntimeError(f"this is the zerox of {zerox.__file__}, not of {work.zerox}")
    found = {stage: times(work, stage) for stage in work.stages}
    allocator = Allocator(Path(work.allocator))  # from here on, so that no time has it
    return {f"stage {stage}": {**found[stage], **counts(work, stage, allocator)} for stage in work.stages}


def main(argv: list[str] | None = None) -> int:
    given = json.loads((argv or sys.argv[1:])[0])
    work = Work(**{**given, "stages": tuple(given["stages"]), "training": Training(**given["training"])})
    print(json.dumps(on_ranks(run, work.ranks, work)))
    return 0


def as_argument(work: Work) -> str:
    return json.dumps(asdict(work))


if __name__ == "__main__":
    sys.exit(main())
