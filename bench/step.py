"""Times the whole training step of zerox beside what people use today, after a check that they train alike.

    python -m bench.step [--device cuda] [--ranks 2 4] [--dtype bf16] [--clip] [--systems zerox DDP] [--caps 1 16]
        [--json FILE]

Every system lives in the same processes, one a rank with one thread each, and the systems take turns, a few steps at
a time, so that what else the machine does falls on all of them alike. A sample is the slowest rank's. "as fast" is
the median over the rounds of DDP's time over the system's, "of floor" of the time without any communication, where
each rank updates no more than its share. The spread is the middle half of the samples. "update" is what of the step
comes after backward: what of the exchange is still under way, clipping, and the optimizer's step().
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch.distributed as dist
from torch import Tensor

from bench.common import TRAINING, Row, for_world_sizes, largest, new_parser, on_ranks, parse, training_of
from bench.jobs import WrongResult
from bench.systems import ALL_SYSTEMS, DDP, SYSTEMS, NoCommunication, System, Training, Zerox
from bench.timing import Timing, elapsed_ms, mark

CHECKED_STEPS = 2
STEPS = 2  # in a sample
LEAST_ROUNDS = 5
# How far parameters may be from DDP's after the checked steps, as a share of how far those have gone. In bf16 most of
# DDP's own updates are lost in rounding, as zerox' are not: its masters keep them.
FARTHEST = {"fp32": 0.01, "bf16": 0.6}
RIVAL = DDP.name
FLOOR = NoCommunication.name
Sample = tuple[float, float]  # milliseconds of a step, and of what of it comes after backward


def time_on_ranks(training: Training, names: list[str], caps_mib: list[int], seconds: float) -> list[Row]:
    """On each rank. Raises WrongResult."""
    systems = [*(ALL_SYSTEMS[name](training) for name in names), *(Zerox(training, cap_mib) for cap_mib in caps_mib)]
    check(systems, training)
    numel = sum(p.numel() for p in training.model().parameters())
    facts = {"ranks": dist.get_world_size(), "numel": numel, **asdict(training)}
    return rows_of(take_turns(systems, training, seconds), facts)


def rows_of(samples: dict[str, list[Sample]], facts: Row) -> list[Row]:
    """``samples``: by system; the same index is the same round."""
    ms = {name: [step_ms for step_ms, _ in each] for name, each in samples.items()}

    rows = []
    for name, found in samples.items():
        timing = Timing.of(ms[name])
        tokens = facts["ranks"] * facts["batch"] * facts["context"]
        row = {"system": name, **facts, **asdict(timing), "spread": timing.spread}
        row |= {"tokens_per_s": tokens / timing.p50_ms * 1e3, "update_ms": statistics.median(each for _, each in found)}
        rows.append(row | {"as_fast": ratio(ms, RIVAL, name), "of_floor": ratio(ms, FLOOR, name)})
    return rows


def ratio(ms: Mapping[str, Sequence[float]], over: str, under: str) -> float | None:
    """The median over the rounds of one system's time over another's; None if the first took no part."""
    return statistics.median(a / b for a, b in zip(ms[over], ms[under], strict=True)) if over in ms else None


def take_turns(systems: Sequence[System], training: Training, seconds: float) -> dict[str, list[Sample]]:
    """The slowest rank's, by system, a sample a round, after check()."""
    samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
    turn, step = list(systems), CHECKED_STEPS
    end = time.monotonic() + seconds
    for index in range(1000):
        if index > LEAST_ROUNDS and largest([time.monotonic()])[0] > end:
            break
        for system in turn:
            found = timed_ms(system, [training.tokens(step + i, dist.get_rank()) for i in range(STEPS)])
            if index > 0:  # the first round warms up
                samples[system.name].append(found)
        step += STEPS
        turn.append(turn.pop(0))
    slowest = {name: [largest(list(each)) for each in zip(*own, strict=True)] for name, own in samples.items()}
    return {name: list(zip(*step_and_update_ms, strict=True)) for name, step_and_update_ms in slowest.items()}


def check(systems: Sequence[System], training: Training) -> None:
    """Runs the first steps, and holds the parameters of those that communicate against DDP's. Raises WrongResult."""
    start = [p.detach() for p in training.model().parameters()]
    found: dict[str, list[Tensor]] = {}
    for system in systems:
        for step in range(CHECKED_STEPS):
            system.step(training.tokens(step, dist.get_rank()))
        if system.communicates:
            found[system.name] = [p.float() for p in system.parameters()]
    reference = found.get(RIVAL)
    for name, params in found.items():
        if reference is not None and distance(params, reference, start) > FARTHEST[training.dtype]:
            raise WrongResult(f"{name} does not train as {RIVAL}: {distance(params, reference, start):.2%} apart")


def timed_ms(system: System, batches: list[Tensor]) -> Sample:
    """A step for each batch, on this rank; their mean."""
    dist.barrier()
    marks = [mark(system.training.device)]
    for tokens in batches:
        system.backward(tokens)
        marks.append(mark(system.training.device))
        system.update()
        marks.append(mark(system.training.device))
    between_ms = [elapsed_ms(start, stop) for start, stop in itertools.pairwise(marks)]
    return sum(between_ms) / len(batches), sum(between_ms[1::2]) / len(batches)


def distance(params: list[Tensor], reference: list[Tensor], start: list[Tensor]) -> float:
    apart = sum(float((a - b).abs().sum()) for a, b in zip(params, reference, strict=True))
    gone = sum(float((a - b.float()).abs().sum()) for a, b in zip(reference, start, strict=True))
    return apart / gone


COLUMNS = {"ranks": "", "system": "<30", "p50_ms": ".1f", "spread": ".1%", "tokens_per_s": ",.0f"}
COLUMNS |= {"as_fast": ".2f", "of_floor": ".2f", "update_ms": ".1f"}


def describe(training: Training) -> str:
    clip = "" if training.max_norm is None else f", clipped to {training.max_norm:g}"
    return f"{training.dtype}, {training.batch} x {training.context} tokens a rank{clip}"


def names_for(wanted: list[str] | None) -> list[str]:
    """Systems whose name has one of the wanted words in it. SystemExit if none has."""
    if not wanted:
        return list(SYSTEMS)
    found = [name for name in ALL_SYSTEMS if any(word.lower() in name.lower() for word in wanted)]
    if not found:
        sys.exit(f"no system has one of these words in its name: {' '.join(wanted)}")
    return found


CAPS = {"type": int, "nargs": "+", "default": [], "metavar": "MIB", "help": "zerox with such buckets, too"}
make_parser = partial(
    new_parser, "bench.step", __doc__, *TRAINING, "device", "ranks", "systems", "batch", "seconds", caps=CAPS
)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training, names = training_of(args), names_for(args.systems)
    numel = sum(p.numel() for p in replace(training, device="cpu").model().parameters())  # ranks need the GPU
    print(f"{numel / 1e6:.1f} M parameters, {describe(training)}; results are checked before they are timed")
    seconds = args.seconds / len(args.ranks)
    for_world_sizes(
        args, COLUMNS, lambda world_size: on_ranks(time_on_ranks, world_size, training, names, args.caps, seconds)
    )


if __name__ == "__main__":
    main()
