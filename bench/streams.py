"""Draws one training step of a GPT: what each thread, each stream of the device and each bucket of each rank was at.

    python -m bench.streams [--device cuda] [--ranks 2] [--dtype bf16] [--clip] [--json FILE] [--png FILE]
        [--trace FOLDER]

The step is the middle one, by the slowest rank's time, of those that were profiled; profiling makes all of them longer.
A stream's kernels are told apart by what they are: zerox' own by their names, copies, NCCL's, and the model's.
Communication is what workers do for a bucket (packing, waiting for messages, reducing), and gathering. It is exposed
while the thread that trains does it or waits for it, else hidden. Hidden is not free where workers and backward share
cores: bench.step measures what is left of it. Traces are for https://ui.perfetto.dev.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import profile

from bench.common import TRAINING, Row, largest, new_parser, on_ranks, parse, print_rows, training_of, write_result
from bench.plots import draw
from bench.step import check, describe
from bench.systems import DDP, Training, Zerox
from bench.trace import KERNEL, PHASE, Range, events_of, profile_all_threads, ranges_of

WARM_UP = 3
STEPS = 5
MODEL, COPY, NCCL = "model", "copy", "NCCL"
COLOURS = {
    **dict.fromkeys(("forward", "step", MODEL), "#d8d8d8"),
    **dict.fromkeys(("backward", "clip"), "#bdbdbd"),
    "settle": "#8c8c8c",
    "launch": "#f2d7cf",
    **dict.fromkeys(("pack", "flatten"), "#c8442c"),
    COPY: "#e3b04b",
    **dict.fromkeys(("land", NCCL), "#9db8d2"),
    **dict.fromkeys(("reduce", "read_flags", "carry"), "#3f6a94"),
    **dict.fromkeys(("norm", "norm_value"), "#7d6b9e"),
    "fold": "#b5d1b4",
    **dict.fromkeys(("update", "update_block"), "#5b8c5a"),
    "gather": "#b28bc0",
}
HIDDEN = ("wait", "let_go", "agree")  # parts of others
# See csrc/workers/ranges.h. None of these lies in another of the same bucket.
COMMUNICATION = ("launch", "pack", "land", "gather", "gather_wait")
# Of the thread that trains; all that it does of the above lies in one of these.
WAITING = ("launch", "settle", "gather", "gather_wait")

Span = tuple[float, float]


# ---- what was seen of one step on one rank


@dataclass(frozen=True)
class Work:
    """``track``: a thread of the host or a stream of the device. ``what``: a key of COLOURS, where it has one."""

    track: str
    what: str
    start_ns: int
    stop_ns: int


def kind_of(kernel: str) -> str:
    own = KERNEL.search(kernel)
    if own:
        return own[1]
    if kernel.startswith(("Memcpy", "Memset")):
        return COPY
    return NCCL if "nccl" in kernel.lower() else MODEL


def work_of(profiled: profile) -> list[Work]:
    """Threads first, each by its start."""
    ranges = ranges_of(profiled)
    trainer = next(each.thread for each in ranges if each.what == "step")
    names = {each.thread: f"thread that does {each.what}" for each in reversed(ranges) if each.what not in HIDDEN}
    for what, name in {"pack": "pack worker", "land": "reduce worker", "launch": "autograd"}.items():
        names |= {each.thread: name for each in ranges if each.what == what}
    names[trainer] = "training"
    host = [Work(names[each.thread], each.what, each.start_ns, each.stop_ns) for each in ranges if each.what in COLOURS]
    return host + device_work(events_of(profiled))


def device_work(events: Iterable[Any]) -> list[Work]:
    """``events``: kineto's. Streams by when they first do something."""
    found = [
        Work(f"stream {event.device_resource_id()}", kind_of(event.name()), event.start_ns(), event.end_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.name().startswith(("zerox::", PHASE))
    ]
    return sorted(found, key=lambda work: work.start_ns)


def times_ms(works: Sequence[Work]) -> dict[str, float]:
    """How long all of it took, and how long each track was busy with each kind of work."""
    found = {"step": (max(work.stop_ns for work in works) - min(work.start_ns for work in works)) / 1e6}
    for track, what in dict.fromkeys((work.track, work.what) for work in works):
        own = [(work.start_ns, work.stop_ns) for work in works if (work.track, work.what) == (track, what)]
        found[f"{track}: {what}"] = length(union(own)) / 1e6
    return found


def bucket_rows(ranges: Sequence[Range]) -> list[Row]:
    """When it happened to each bucket, in ms from the start of forward, and how long communication took."""
    forward = next(each for each in ranges if each.what == "forward")

    def span(each: Range) -> Span:
        return (each.start_ns - forward.start_ns) / 1e6, (each.stop_ns - forward.start_ns) / 1e6

    waiting = union(span(each) for each in ranges if each.thread == forward.thread and each.what in WAITING)
    rows = []
    for index in sorted({each.bucket for each in ranges if each.bucket is not None}):
        own = [each for each in ranges if each.bucket == index]
        starts, stops = ({each.what: span(each)[end] for each in own} for end in (0, 1))
        row: Row = {"bucket": index, "launched": starts.get("launch")}
        row |= {"packed": stops.get("pack"), "arrived": stops.get("wait"), "reduced": stops.get("land")}
        row |= {"updated": stops.get("update"), "gathered": stops.get("gather_wait")}
        work = [span(each) for each in own if each.what in COMMUNICATION]
        exposed_ms = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in work for b in waiting)
        rows.append(row | {"hidden_ms": length(work) - exposed_ms, "exposed_ms": exposed_ms})
    return rows


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


# ---- all ranks


def typical_step(training: Training, trace: Path | None) -> list[tuple[list[Work], list[Row]]]:
    """On each rank. By rank: who did what, and what happened to buckets."""
    rank = dist.get_rank()
    system = Zerox(training)
    check([DDP(training), system], training)
    profiles = []
    for index in range(WARM_UP + STEPS):
        tokens = training.tokens(index, rank)
        seen = profile_all_threads(cuda=training.device == "cuda")
        dist.barrier()
        seen.start()
        system.step(tokens)
        if training.device == "cuda":
            torch.cuda.synchronize()
        seen.stop()
        profiles.append(seen)
    step_ms = largest([times_ms(work_of(seen))["step"] for seen in profiles[WARM_UP:]])
    typical = profiles[WARM_UP + step_ms.index(statistics.median_low(step_ms))]
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
        typical.export_chrome_trace(str(trace / f"rank-{rank}.json"))
    own = work_of(typical), bucket_rows(ranges_of(typical))
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def save_streams(by_title: Mapping[str, Sequence[Work]], title: str, path: Path | None) -> None:
    """A panel a rank: what was done on each track over the time of the step."""
    tracks = {text: list(dict.fromkeys(work.track for work in works)) for text, works in by_title.items()}
    start_ns = min(work.start_ns for works in by_title.values() for work in works)

    def paint(panel: Any, works: Sequence[Work], names: list[str]) -> None:
        for what in dict.fromkeys([*COLOURS, *(work.what for work in works)]):
            if drawn := [work for work in works if work.what == what]:
                panel.barh(
                    [names.index(work.track) for work in drawn],
                    [(work.stop_ns - work.start_ns) / 1e6 for work in drawn],
                    left=[(work.start_ns - start_ns) / 1e6 for work in drawn],
                    color=COLOURS.get(what, "black"),
                    label=what,
                )
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()

    panels = {text: partial(paint, works=works, names=tracks[text]) for text, works in by_title.items()}
    draw(path, title, (12, 1.6 + sum(0.3 + 0.4 * len(each) for each in tracks.values())), panels)


COLUMNS = {"bucket": "", "launched": ".1f", "packed": ".1f", "arrived": ".1f", "reduced": ".1f", "updated": ".1f"}
COLUMNS |= {"gathered": ".1f", "hidden_ms": ".1f", "exposed_ms": ".1f"}


RANKS = {"type": int, "default": 1, "metavar": "N", "help": "on one machine"}
TRACE = {"type": Path, "metavar": "FOLDER", "help": "write a chrome trace of each rank there"}
make_parser = partial(
    new_parser, "bench.streams", __doc__, *TRAINING, "device", "batch", "png", batch=8, ranks=RANKS, trace=TRACE
)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training = training_of(args)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says when it starts and stops
    found = on_ranks(typical_step, args.ranks, training, args.trace)
    title = f"zerox on {args.device}: {describe(training)}"
    print(title)
    rows: list[Row] = []
    by_title = {}
    for rank, (works, buckets) in enumerate(found):
        hidden, exposed = (sum(bucket[f"{name}_ms"] for bucket in buckets) for name in ("hidden", "exposed"))
        of_rank = f"rank {rank}: communication of {hidden + exposed:.1f} ms, {exposed:.1f} ms exposed"
        by_title[of_rank] = works
        rows.append({**asdict(training), "ranks": args.ranks, "rank": rank})
        rows[-1] |= {"ms": times_ms(works), "hidden_ms": hidden, "exposed_ms": exposed, "buckets": buckets}
        print(f"\n{of_rank}")
        print("\n".join(f"{ms:>10.3f} ms  {name}" for name, ms in rows[-1]["ms"].items()))
        print_rows(buckets, COLUMNS, header=True)
    write_result(args, rows)
    save_streams(by_title, title, args.png)


if __name__ == "__main__":
    main()
