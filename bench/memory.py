"""The most bytes that a training step takes on a rank, of zerox and of what people use today, from the allocator.

    python -m bench.memory [--ranks 2 4] [--dtype bf16] [--clip] [--systems zerox DDP] [--json FILE]

Each system has processes of its own, one a rank; every tensor that any of their threads allocates on the CPU counts:
parameters, gradients, moments, masters, buffers, and the few activations of 8 tokens. No weight is tied: autograd holds
both gradients of one that is, before it adds them. "peak" is the most at one time in some steps, of the rank where it
is largest, "kept" what is left after zero_grad(). The estimate is zerox.estimate's, which knows no activations:
typical_peak, where buckets leave as fast as backward fills them, and peak, where none does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from bench.allocator import Allocator, build
from bench.common import TRAINING, Row, for_world_sizes, largest, new_parser, on_ranks, parse, training_of
from bench.step import RIVAL, names_for
from bench.systems import ALL_SYSTEMS, System, Training, Zerox
from zerox import estimate
from zerox._C import most_room_bytes, room_bytes

STEPS = 3  # counted, after as many that are not: state is made in the first
MIB = 2**20


def measure(training: Training, make: Callable[[Training], System], library: Path) -> Row:
    """On each rank."""
    allocator = Allocator(library)
    base = allocator.now
    system = make(training)

    def run(first: int) -> None:
        for step in range(first, first + STEPS):
            system.step(training.tokens(step, dist.get_rank()))

    run(0)
    most_room_bytes()
    peak = allocator.peak_of(lambda: run(STEPS)) - base
    peak += most_room_bytes()  # of whole buckets in stage 3, which are not the allocator's
    system.module.zero_grad()
    system.optimizer.zero_grad()
    kept = allocator.now - base + room_bytes()
    peak, kept = (int(each) for each in largest([float(peak), float(kept)]))
    row: Row = {"system": system.name, "ranks": dist.get_world_size(), "peak": peak, "kept": kept, "estimate": []}
    if isinstance(system, Zerox):
        params, world_size = training.model().parameters(), dist.get_world_size()
        formula = estimate(params, world_size, stage=system.stage, resident_mb=system.resident_mb)
        row["estimate"] = [formula.typical_peak, formula.peak]
    estimate_mib = " to ".join(f"{each / MIB:,.1f}" for each in row["estimate"])
    return {**row, "peak_mib": peak / MIB, "kept_mib": kept / MIB, "estimate_mib": estimate_mib}


COLUMNS = {"ranks": "", "system": "<30", "peak_mib": ",.1f", "kept_mib": ",.1f", "of_rival": ".1%"}
COLUMNS |= {"estimate_mib": ">16"}


def rows_at(world_size: int, training: Training, wanted: list[str] | None) -> list[Row]:
    library = build()
    found = [on_ranks(measure, world_size, training, ALL_SYSTEMS[name], library) for name in names_for(wanted)]
    rival = next((row["peak"] for row in found if row["system"] == RIVAL), None)
    return [{**row, "of_rival": row["peak"] / rival if rival else None} for row in found]


make_parser = partial(new_parser, "bench.memory", __doc__, *TRAINING, "ranks", "systems")


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training = training_of(args, context=8, batch=1, tied=False)
    for_world_sizes(args, COLUMNS, partial(rows_at, training=training, wanted=args.systems))


if __name__ == "__main__":
    main()
