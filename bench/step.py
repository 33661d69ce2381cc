"""Times the whole training step of zerox beside what people use today, after a check that they train alike.

    python -m bench.step [--ranks 2 4] [--dtype bf16] [--clip] [--accumulate 4] [--systems zerox DDP] [--json FILE]
        [--png FILE]

Every system lives in the same processes, one a rank with one thread each, and the systems take turns, a few steps at
a time, so that what else the machine does falls on all of them alike. A sample is the slowest rank's. "as fast" is
the median over the rounds of DDP's time over the system's, "of floor" of the time without any communication, where
each rank updates no more than its share. The spread is the middle half of the samples. "first" is the first step of
all after construction, in a process that has trained without any optimizer before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from bench.facts import write_result
from bench.jobs import WrongResult
from bench.options import names_for, parse_step, step_parser
from bench.plots import save_bars
from bench.ranks import largest, on_ranks
from bench.systems import DDP, SYSTEMS, NoCommunication, System, Training
from bench.timing import Timing

CHECKED_STEPS = 2
STEPS = 2  # in a sample
LEAST_ROUNDS = 5
# How far parameters may be from DDP's after the checked steps, as a share of how far those have gone. In bf16 most of
# DDP's own updates are lost in rounding, as zerox' are not: its masters keep them.
FARTHEST = {"fp32": 0.01, "bf16": 0.6}
RIVAL = DDP.name
FLOOR = NoCommunication.name

Row = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """Milliseconds a step, by system; the same index is the same round."""

    training: Training
    world_size: int
    numel: int
    first_ms: dict[str, float]
    ms: dict[str, list[float]]

    def rows(self) -> list[Row]:
        return [self.row(name) for name in self.ms]

    def row(self, name: str) -> Row:
        timing = Timing.of(self.ms[name])
        tokens = self.world_size * self.training.batch * self.training.context * self.training.micro_batches
        return {
            "system": name,
            "ranks": self.world_size,
            "numel": self.numel,
            **asdict(self.training),
            **asdict(timing),
            "spread": timing.spread,
            "first_ms": self.first_ms[name],
            "tokens_per_s": tokens / timing.p50_ms * 1e3,
            "as_fast": self.ratio(RIVAL, name),
            "of_floor": self.ratio(FLOOR, name),
        }

    def ratio(self, over: str, under: str) -> float | None:
        if over not in self.ms:
            return None
        return statistics.median(a / b for a, b in zip(self.ms[over], self.ms[under], strict=True))


def time_on_ranks(training: Training, names: list[str], seconds: float) -> Samples:
    """On each rank. Raises WrongResult."""
    systems = [SYSTEMS[name](training) for name in names]
    first_ms = check(systems, training)
    numel = sum(p.numel() for p in training.model().parameters())
    return Samples(training, dist.get_world_size(), numel, first_ms, take_turns(systems, training, seconds))


def take_turns(systems: Sequence[System], training: Training, seconds: float) -> dict[str, list[float]]:
    """Milliseconds a step of the slowest rank, by system, a sample a round, after check()."""
    ms: dict[str, list[float]] = {system.name: [] for system in systems}
    turn, step = list(systems), CHECKED_STEPS
    end = time.monotonic() + seconds
    for index in range(1000):
        if index > LEAST_ROUNDS and largest([time.monotonic()])[0] > end:
            break
        for system in turn:
            elapsed_ms = timed_ms(system, *(training.batches(step + i, dist.get_rank()) for i in range(STEPS)))
            if index > 0:  # the first round warms up
                ms[system.name].append(elapsed_ms / STEPS)
        step += STEPS
        turn.append(turn.pop(0))
    return {name: largest(samples) for name, samples in ms.items()}


def check(systems: Sequence[System], training: Training) -> dict[str, float]:
    """Runs the first steps, and holds the parameters of those that communicate against DDP's.

    Returns milliseconds of each system's first step, the slowest rank's.
    """
    start = [p.detach() for p in training.model().parameters()]
    found: dict[str, list[Tensor]] = {}
    first_ms: dict[str, float] = {}
    warm_up(training)
    for system in systems:
        first_ms[system.name] = largest([timed_ms(system, training.batches(0, dist.get_rank()))])[0]
        for step in range(1, CHECKED_STEPS):
            system.step(training.batches(step, dist.get_rank()))
        if system.communicates:
            found[system.name] = [p.float() for p in system.parameters()]
    reference = found.get(RIVAL)
    for name, params in found.items():
        if reference is not None and distance(params, reference, start) > FARTHEST[training.dtype]:
            raise WrongResult(f"{name} does not train as {RIVAL}: {distance(params, reference, start):.2%} apart")
    return first_ms


def warm_up(training: Training) -> None:
    """What whoever comes first in a process pays for all: torch's own first calls."""
    model = training.model()
    for tokens in training.batches(0, dist.get_rank()):
        model(tokens[:, :-1], tokens[:, 1:]).backward()


def timed_ms(system: System, *steps: list[Tensor]) -> float:
    """On this rank, all of it."""
    dist.barrier()
    start = time.perf_counter()
    for batches in steps:
        system.step(batches)
    return (time.perf_counter() - start) * 1e3


def distance(params: list[Tensor], reference: list[Tensor], start: list[Tensor]) -> float:
    apart = sum(float((a - b).abs().sum()) for a, b in zip(params, reference, strict=True))
    gone = sum(float((a - b.float()).abs().sum()) for a, b in zip(reference, start, strict=True))
    return apart / gone


HEADER = ("ranks", "system", "p50 ms", "spread", "tokens/s", "as fast", "of floor", "first ms")
WIDTHS = (5, 30, 9, 7, 9, 8, 8, 9)


def line(texts: tuple[str, ...]) -> str:
    cells = zip(texts, WIDTHS, strict=True)
    return "  ".join(f"{text:<{w}}" if i == 1 else f"{text:>{w}}" for i, (text, w) in enumerate(cells))


def cells(row: Row) -> tuple[str, ...]:
    ratios = ["" if row[key] is None else f"{row[key]:.2f}x" for key in ("as_fast", "of_floor")]
    numbers = (f"{row['p50_ms']:.1f}", f"{row['spread']:.1%}", f"{row['tokens_per_s']:,.0f}")
    return (str(row["ranks"]), row["system"], *numbers, *ratios, f"{row['first_ms']:.1f}")


def run(world_sizes: list[int], training: Training, wanted: list[str] | None, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for world_size in world_sizes:
        names = names_for(wanted, world_size)
        samples = on_ranks(time_on_ranks, world_size, training, names, seconds / len(world_sizes))
        if not rows:
            print(f"{samples.numel / 1e6:.1f} M parameters, {describe(training)}; results agree")
            print(line(HEADER))
        rows += samples.rows()
        print("\n".join(line(cells(row)) for row in samples.rows()), flush=True)
    return rows


def describe(training: Training) -> str:
    clip = "" if training.max_norm is None else f", clipped to {training.max_norm:g}"
    many = "" if training.micro_batches == 1 else f", {training.micro_batches} micro-batches a step"
    return f"{training.dtype}, {training.batch} x {training.context} tokens a rank{many}{clip}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = step_parser("bench.step", __doc__)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step (default: 1)")
    parser.add_argument("--batch", type=int, default=Training.batch, help="sequences of 128 tokens a rank (default: 2)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all timing, about (default: %(default)s)")
    return parse_step(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    training = replace(
        Training(dtype=args.dtype, layers=args.layers, batch=args.batch),
        max_norm=1.0 if args.clip else None,
        micro_batches=args.accumulate,
    )
    try:
        rows = run(args.ranks, training, args.systems, args.seconds)
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        write_result(args.json, "bench.step", argv, rows)
    if args.png:
        times = [(f"{row['ranks']} ranks", row["system"], row["p50_ms"]) for row in rows]
        title = f"a training step, ms: {rows[0]['numel'] / 1e6:.1f} M parameters, {describe(training)}"
        save_bars(times, title, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
