"""Draws one training step of a GPT in one process: what each stream of the device and each thread of the host was at.

    python -m bench.streams [--device cuda] [--dtype bf16] [--clip] [--json FILE] [--png FILE] [--trace FILE]

The step is the middle one, by its time, of those that were profiled. Busy is the time in which a stream runs something;
a stream's kernels are told apart by what they are: zerox' own by their names, copies, NCCL's, and the model's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.facts import write_result
from bench.options import add_device, parse_step, training_parser
from bench.overlap import Phased, PhasedStage1, length, union
from bench.plots import new_figure, save_figure
from bench.step import describe
from bench.systems import Training
from bench.trace import KERNEL, PHASE, all_threads, ranges_of

WARM_UP = 3
STEPS = 5
MODEL, COPY, NCCL = "model", "copy", "NCCL"
COLOURS = {
    what: colour
    for colour, kinds in {
        "#d8d8d8": ("forward", "step", MODEL),
        "#bdbdbd": ("backward", "clip"),
        "#8c8c8c": ("settle",),
        "#f2d7cf": ("launch",),
        "#c8442c": ("pack", "flatten"),
        "#e3b04b": (COPY,),
        "#9db8d2": ("land", NCCL),
        "#3f6a94": ("reduce", "read_flags", "carry"),
        "#7d6b9e": ("norm", "norm_value"),
        "#b5d1b4": ("fold",),
        "#5b8c5a": ("update", "update_block"),
        "#b28bc0": ("gather",),
    }.items()
    for what in kinds
}
HIDDEN = ("wait", "let_go", "agree")  # parts of others


@dataclass(frozen=True)
class Work:
    """``lane``: a thread of the host or a stream of the device. ``what``: a key of COLOURS, where it has one."""

    lane: str
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
    names |= {each.thread: "pack lane" for each in ranges if each.what == "pack"}
    names |= {each.thread: "land lane" for each in ranges if each.what == "land"}
    names |= {each.thread: "autograd" for each in ranges if each.what == "launch"}
    names[trainer] = "training"
    host = [Work(names[each.thread], each.what, each.start_ns, each.stop_ns) for each in ranges if each.what in COLOURS]
    return host + device_work(kineto_events(profiled))


def kineto_events(profiled: profile) -> list[Any]:
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return profiled.profiler.kineto_results.events()


def device_work(events: Iterable[Any]) -> list[Work]:
    """``events``: kineto's. Streams by when they first do something."""
    found = [
        Work(f"stream {event.device_resource_id()}", kind_of(event.name()), event.start_ns(), event.end_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.name().startswith(("zerox::", PHASE))
    ]
    return sorted(found, key=lambda work: work.start_ns)


def profile_step(training: Training, stage: int) -> list[profile]:
    """By the time that a step took."""
    system = (PhasedStage1 if stage == 1 else Phased)(training)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if training.device == "cuda" else [])]
    found = []
    for index in range(WARM_UP + STEPS):
        batches = training.batches(index, 0)
        seen = profile(activities=activities, experimental_config=all_threads())
        seen.start()
        system.step(batches)
        if training.device == "cuda":
            torch.cuda.synchronize()
        seen.stop()
        found.append(seen)
    return sorted(found[WARM_UP:], key=lambda seen: times_ms(work_of(seen))["step"])


def times_ms(works: Sequence[Work]) -> dict[str, float]:
    """How long all of it took, and how long each lane was busy with each kind of work."""
    found = {"step": (max(work.stop_ns for work in works) - min(work.start_ns for work in works)) / 1e6}
    for lane, what in dict.fromkeys((work.lane, work.what) for work in works):
        own = [(work.start_ns, work.stop_ns) for work in works if (work.lane, work.what) == (lane, what)]
        found[f"{lane}: {what}"] = length(union(own)) / 1e6
    return found


def save_streams(works: Sequence[Work], title: str, path: Path) -> None:
    lanes = list(dict.fromkeys(work.lane for work in works))
    figure = new_figure(12, 1.6 + 0.4 * len(lanes), path)
    if figure is None:
        return
    panel = figure.subplots()
    start_ns = min(work.start_ns for work in works)
    for what in dict.fromkeys([*COLOURS, *(work.what for work in works)]):
        drawn = [work for work in works if work.what == what]
        if drawn:
            panel.barh(
                [lanes.index(work.lane) for work in drawn],
                [(work.stop_ns - work.start_ns) / 1e6 for work in drawn],
                left=[(work.start_ns - start_ns) / 1e6 for work in drawn],
                color=COLOURS.get(what, "black"),
                label=what,
            )
    panel.set_yticks(range(len(lanes)), lanes)
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("ms")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=10, frameon=False, fontsize=8)
    figure.suptitle(title)
    save_figure(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_parser("bench.streams", __doc__)
    add_device(parser)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens (default: %(default)s)")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="of ZeRO (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a chrome trace of the step there")
    return parse_step(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    training = Training(dtype=args.dtype, layers=args.layers, batch=args.batch, device=args.device)
    training = replace(training, max_norm=1.0 if args.clip else None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says when it starts and stops
    profiles = profile_step(training, args.stage)
    typical = profiles[len(profiles) // 2]
    works = work_of(typical)
    row = {**asdict(training), "stage": args.stage, "ms": times_ms(works)}
    title = f"zerox, stage {args.stage}, on {args.device}: {describe(training)}"
    print(title)
    print("\n".join(f"{ms:>10.3f} ms  {name}" for name, ms in row["ms"].items()))
    if args.trace:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        typical.export_chrome_trace(str(args.trace))
    if args.json:
        write_result(args.json, "bench.streams", argv, [row])
    if args.png:
        save_streams(works, title, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
