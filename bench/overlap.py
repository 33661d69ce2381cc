"""Shows when each bucket of a training step left and landed, and what of that was hidden, after a check of results.

    python -m bench.overlap [--ranks 2] [--dtype bf16] [--clip] [--stage 1] [--json FILE] [--png FILE] [--trace FILE]

Some steps are profiled, each beside one that is not, which tells what the profiler itself costs. Numbers are the
medians of the profiled steps; the picture and the chrome trace (for https://ui.perfetto.dev) show the one whose time
is their median, on all ranks.

Communication is what lanes do for a bucket (packing, waiting for messages, reducing), and gathering. It is exposed
while the thread that trains does it or waits for it, else hidden. Hidden is not free where lanes and backward share
cores: bench.step measures what is left of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.profiler import profile

from bench.facts import write_result
from bench.options import parse_step, training_parser
from bench.ranks import largest, on_ranks
from bench.step import CHECKED_STEPS, check, describe
from bench.systems import DDP, Training, Zerox
from bench.timeline import save_timeline
from bench.trace import Range, merge_chrome_traces, phase, profile_all_threads, ranges_of

STEPS = 15  # that are profiled, and as many that are not
WARM_UP = 2
PHASES = ("forward", "backward", "clip", "step")
# See csrc/lanes/ranges.h. None of these lies in another of the same bucket.
COMMUNICATION = ("launch", "pack", "land", "gather", "gather_wait", "gather_grads", "gather_grads_wait")
# Of the thread that trains; all that it does of the above lies in one of these.
WAITING = ("launch", "settle", "gather", "gather_wait")

Span = tuple[float, float]
Row = dict[str, Any]


class Phased(Zerox):
    """Its steps say what they are at."""

    def step(self, batches: Sequence[Tensor]) -> None:
        [tokens] = batches
        self.optimizer.zero_grad()
        with phase("forward"):
            loss = self.module(tokens[:, :-1], tokens[:, 1:])
        with phase("backward"):
            loss.backward()
        if self.training.max_norm is not None:
            with phase("clip"):
                self.clip(self.training.max_norm)
        with phase("step"):
            self.optimizer.step()

    @property
    def bucket_mib(self) -> list[float]:
        return [bucket.buffer.flat.nbytes / 2**20 for bucket in self.ours.inside.buckets]


class PhasedStage1(Phased):
    stage = 1


# ---- what the ranges of one step say


@dataclass(frozen=True)
class BucketTimes:
    """When it happened, in milliseconds from the step's start, and how long communication took."""

    launched: float
    packed: float
    arrived: float  # messages of all ranks, as far as somebody waited for them
    landed: float
    updated: float
    gathered: float
    hidden_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds. ``waited``: of the thread that trains, for communication; the others add up what buckets took."""

    step_ms: float
    forward_ms: float
    backward_ms: float
    waited_ms: float
    hidden_ms: float
    exposed_ms: float


def times_of(ranges: Sequence[Range]) -> tuple[StepTimes, list[BucketTimes]]:
    phases = {each.what: each for each in ranges if each.what in PHASES}
    start_ns, trainer = phases["forward"].start_ns, phases["forward"].thread

    def span(each: Range) -> Span:
        return (each.start_ns - start_ns) / 1e6, (each.stop_ns - start_ns) / 1e6

    waiting = union(span(each) for each in ranges if each.thread == trainer and each.what in WAITING)
    buckets = []
    for index in sorted({each.bucket for each in ranges if each.bucket is not None}):
        own = [each for each in ranges if each.bucket == index]
        last = {each.what: span(each) for each in own}
        work = [span(each) for each in own if each.what in COMMUNICATION]
        exposed = overlap(work, waiting)
        buckets.append(
            BucketTimes(
                launched=last["launch"][0],
                packed=last["pack"][1],
                arrived=last["wait"][1],
                landed=last["land"][1],
                updated=last["update"][1],
                gathered=last["gather_wait"][1],
                hidden_ms=length(work) - exposed,
                exposed_ms=exposed,
            )
        )
    totals = StepTimes(
        step_ms=span(phases["step"])[1],
        forward_ms=length([span(phases["forward"])]),
        backward_ms=length([span(phases["backward"])]),
        waited_ms=length(waiting),
        hidden_ms=sum(each.hidden_ms for each in buckets),
        exposed_ms=sum(each.exposed_ms for each in buckets),
    )
    return totals, buckets


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def overlap(these: Iterable[Span], others: Sequence[Span]) -> float:
    """Time that is in both; neither overlaps itself."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in these for b in others)


def medians(rows: Sequence[Any]) -> Row:
    """Field by field of dataclasses of one kind."""
    return {key: statistics.median(asdict(row)[key] for row in rows) for key in asdict(rows[0])}


# ---- on each rank


@dataclass
class Observed:
    """``ms`` of each round, with the profiler and without, on the slowest rank; what was seen of each profiled step."""

    profiled_ms: list[float]
    plain_ms: list[float]
    profiles: list[profile]

    @property
    def slowed(self) -> float:
        return statistics.median(a / b for a, b in zip(self.profiled_ms, self.plain_ms, strict=True))

    @property
    def typical(self) -> int:
        return self.profiled_ms.index(statistics.median_low(self.profiled_ms))


def observe(system: Phased, steps: int) -> Observed:
    training, rank, profiles = system.training, dist.get_rank(), []
    ms: dict[bool, list[float]] = {True: [], False: []}
    for index in range(WARM_UP + steps):
        for profiled in (True, False) if index % 2 else (False, True):
            batches = training.batches(CHECKED_STEPS + index, rank)
            seen = profile_all_threads() if profiled else None
            if seen is not None:
                seen.start()
            dist.barrier()
            start = time.perf_counter()
            system.step(batches)
            elapsed_ms = (time.perf_counter() - start) * 1e3
            if seen is not None:
                seen.stop()
            if index >= WARM_UP:
                ms[profiled].append(elapsed_ms)
                profiles += [seen] if seen is not None else []
    return Observed(largest(ms[True]), largest(ms[False]), profiles)


def overlap_on_ranks(training: Training, stage: int, steps: int, trace: Path | None) -> tuple[Row, list[list[Range]]]:
    """On each rank. What there is to say, and the typical step's ranges by rank. Raises WrongResult."""
    system = (PhasedStage1 if stage == 1 else Phased)(training)
    check([DDP(training), system], training)
    seen = observe(system, steps)
    ranges = [ranges_of(each) for each in seen.profiles]
    found = [times_of(each) for each in ranges]
    buckets = [medians(of_steps) for of_steps in zip(*(buckets for _, buckets in found), strict=True)]
    row = {
        **medians([totals for totals, _ in found]),
        "buckets": [{"mib": mib, **each} for mib, each in zip(system.bucket_mib, buckets, strict=True)],
    }
    rows: list[Row] = [{}] * dist.get_world_size()
    typical: list[list[Range]] = [[]] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    dist.all_gather_object(typical, ranges[seen.typical])
    if trace is not None:
        save_trace(seen.profiles[seen.typical], trace)
    result = {
        "ranks": dist.get_world_size(),
        "numel": sum(p.numel() for p in system.module.parameters()),
        **asdict(training),
        "stage": stage,
        "steps": steps,
        "slowed_by_profiler": seen.slowed,
        "by_rank": rows,
    }
    return result, typical


def save_trace(profiled: profile, path: Path) -> None:
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    own = [Path(folder[0], f"{rank}.json") for rank in range(dist.get_world_size())]
    profiled.export_chrome_trace(str(own[dist.get_rank()]))
    dist.barrier()
    if dist.get_rank() == 0:
        merge_chrome_traces(own, path)


# ---- what is printed

COLUMNS = ("bucket", "MiB", "launched", "packed", "arrived", "landed", "updated", "gathered", "hidden", "exposed")


def summary(own: Row) -> str:
    total = own["hidden_ms"] + own["exposed_ms"]
    hidden = f"{own['hidden_ms']:.1f} hidden ({own['hidden_ms'] / total:.0%})"
    return f"communication of {total:.1f} ms, {hidden}, {own['exposed_ms']:.1f} exposed"


def report(row: Row) -> str:
    lines = []
    slowest = max(range(row["ranks"]), key=lambda rank: row["by_rank"][rank]["step_ms"])
    for rank, own in enumerate(row["by_rank"]):
        lines += [
            f"\nrank {rank}{', the slowest' if rank == slowest else ''}: step {own['step_ms']:.1f} ms, of it forward "
            f"{own['forward_ms']:.1f}, backward {own['backward_ms']:.1f}, waiting for communication "
            f"{own['waited_ms']:.1f}; ms from the step's start:",
            "  ".join(f"{column:>8}" for column in COLUMNS),
        ]
        for index, bucket in enumerate(own["buckets"]):
            cells = [f"{value:.1f}" for value in bucket.values()]
            lines.append("  ".join(f"{cell:>8}" for cell in [str(index), *cells]))
        lines.append(summary(own))
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_parser("bench.overlap", __doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="world size (default: 2)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 tokens a rank (default: 1)")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="to profile (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a chrome trace of one step there")
    args = parse_step(parser, argv)
    if args.ranks < 2:
        parser.error("--ranks: one rank alone has nothing to hide")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    training = Training(dtype=args.dtype, layers=args.layers, batch=args.batch, max_norm=1.0 if args.clip else None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says when it starts and stops
    try:
        row, typical = on_ranks(overlap_on_ranks, args.ranks, training, args.stage, args.steps, args.trace)
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    title = f"zerox, stage {args.stage}: {row['numel'] / 1e6:.1f} M parameters, {describe(training)}"
    print(f"{title}; results agree\nthe profiler makes a step {row['slowed_by_profiler']:.2f}x as long")
    print(report(row))
    if args.json:
        write_result(args.json, "bench.overlap", argv, [row])
    if args.png:
        own = [asdict(times_of(ranges)[0]) for ranges in typical]  # of this step: the row has medians
        save_timeline(typical, [f"rank {rank}: {summary(each)}" for rank, each in enumerate(own)], title, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
