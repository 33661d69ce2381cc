"""What each limit of resident parameters costs (ZeRO stage 3): memory, time, bytes fetched, reads that waited.

    python -m bench.residency [--ranks 2 4] [--dtype bf16] [--seconds 120] [--json FILE] [--png FILE]

The limits are the least possible, 64 MiB, a quarter of the parameters, the default, and none; one that is as much as
another for the model that is timed is left out. Time is that of bench.step, of systems that take turns in the same
processes; "of_stage_2" and "of_fsdp2" are the medians over the rounds of their time over the system's. Memory is that
of bench.memory, on another model (no weight tied, 8 tokens), each in processes of its own; bench.memory itself has
stage 2's and FSDP2's. Fetches are a step's, on rank 0. The picture shows a step: how much is resident, and when a read
waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench import memory
from bench.allocator import build
from bench.common import TRAINING, Row, for_world_sizes, new_parser, on_ranks, parse, training_of
from bench.plots import draw
from bench.step import check, ratio, take_turns
from bench.systems import FSDP2Resharded, System, Training, Zerox, ZeroxStage3
from bench.timing import Timing
from zerox._C import ResidencyEvent
from zerox.residency.residency import Residency

MIB = 2**20
CAP_MIB = 16.0  # of a bucket: zerox's default
STEPS = 4  # in which fetches are counted
Kind = ResidencyEvent.Kind


class Limited(ZeroxStage3):
    def __init__(self, training: Training, limit: str) -> None:
        self.resident_mb = limits_mb(training)[limit]
        super().__init__(training, CAP_MIB)
        self.name = f"stage 3, {limit}"


def limits_mb(training: Training) -> dict[str, float | None]:
    """By name. The least is the largest bucket: of one parameter, or of several up to the cap."""
    sizes = [param.nbytes / MIB for param in training.model().parameters()]
    least = max(max(sizes), min(CAP_MIB, sum(sizes)))
    return {"least": least, "64 MiB": 64.0, "P/4": max(sum(sizes) / 4, least), "default": None, "inf": float("inf")}


def distinct_limits(training: Training) -> list[str]:
    """Their names: of those within 2% the first, since another measurement of it would show nothing but noise."""
    found: dict[str, float | None] = {}
    for name, limit in limits_mb(training).items():
        if not any(
            limit == other or (limit and other and isclose(limit, other, rel_tol=0.02)) for other in found.values()
        ):
            found[name] = limit
    return list(found)


@dataclass(frozen=True)
class Seen:
    """A step of a limit: what happened to buckets, and the limit in bytes."""

    name: str
    limit: float
    events: list[tuple[Kind, int, int, int]]  # kind, bucket, ns, resident bytes


def time_on_ranks(training: Training, seconds: float) -> tuple[list[Row], list[Seen]]:
    """On each rank."""
    limited = [Limited(training, limit) for limit in distinct_limits(training)]
    systems: list[System] = [Zerox(training), FSDP2Resharded(training), *limited]
    check(systems, training)
    samples = {name: [step_ms for step_ms, _ in each] for name, each in take_turns(systems, training, seconds).items()}
    rows = []
    for system in systems:
        step_ms = Timing.of(samples[system.name]).p50_ms
        row: Row = {"system": system.name, "ranks": dist.get_world_size(), "step_ms": step_ms}
        row |= {"of_stage_2": ratio(samples, Zerox.name, system.name)}
        row |= {"of_fsdp2": ratio(samples, FSDP2Resharded.name, system.name)}
        rows.append(row | dict.fromkeys(("fetched_mib", "fetches", "waits", "peak_mib", "estimate_mib")))
    seen = [look(system, training, row) for system, row in zip(limited, rows[2:], strict=True)]
    return rows, seen


def look(system: Limited, training: Training, row: Row) -> Seen:
    """Counts what is fetched in some steps, and records the last one."""
    gather = system.ours.inside.gather
    assert isinstance(gather, Residency)
    residents, before = gather.residents, gather.residents.counts
    for step in range(STEPS):
        residents.record(step == STEPS - 1)
        system.step(training.tokens(step, dist.get_rank()))
    after = residents.counts
    row["fetched_mib"] = (after.fetched_bytes - before.fetched_bytes) / MIB / STEPS
    row["fetches"] = (after.fetches - before.fetches) / STEPS
    row["waits"] = (after.waits - before.waits) / STEPS
    events = [(each.kind, each.bucket, each.time_ns, each.resident_bytes) for each in residents.take_events()]
    return Seen(system.name, gather.check_room([]), events)


def weigh(training: Training, world_size: int, rows: list[Row]) -> None:
    """Adds peaks and estimates to the rows of limits."""
    untied = replace(training, context=8, batch=1, tied=False)
    library = build()
    for row, limit in zip(rows[2:], distinct_limits(training), strict=True):
        found = on_ranks(memory.measure, world_size, untied, partial(Limited, limit=limit), library)
        row |= {key: found[key] for key in ("peak_mib", "estimate_mib")}


# ---- the picture


def save_residency(seen: Sequence[Seen], title: str, path: Path | None) -> None:
    """A panel a limit: resident MiB over the time of a step, the limit, and the reads that waited."""

    def paint(panel: Any, each: Seen) -> None:
        start = each.events[0][2]
        times, mib = zip(*(((ns - start) / 1e6, nbytes / MIB) for _, _, ns, nbytes in each.events), strict=True)
        panel.step(times, mib, where="post", color="#4d6f8f", label="resident")
        if each.limit < float("inf"):
            panel.axhline(each.limit / MIB, color="#bbbbbb", linestyle="--", linewidth=1, label="limit")
        for begin, end in waits_ms(each, start):
            panel.axvspan(begin, end, color="#c8442c", alpha=0.35, linewidth=0, label="a read waits")
        panel.set_ylim(0, 1.08 * max(nbytes for other in seen for _, _, _, nbytes in other.events) / MIB)
        panel.set_ylabel("MiB")

    draw(path, title, (10, 1.2 + 1.7 * len(seen)), {each.name: partial(paint, each=each) for each in seen})


def waits_ms(seen: Seen, start_ns: int) -> list[tuple[float, float]]:
    """Of each bucket in turn: from where a read began to wait until it went on."""
    begun: dict[int, int] = {}
    found = []
    for kind, bucket, ns, _ in seen.events:
        if kind == Kind.WAIT:
            begun[bucket] = ns
        elif kind == Kind.GO_ON and bucket in begun:
            found.append(((begun.pop(bucket) - start_ns) / 1e6, (ns - start_ns) / 1e6))
    return found


COLUMNS = {"ranks": "", "system": "<18", "peak_mib": ",.1f", "estimate_mib": ">16", "step_ms": ".1f"}
COLUMNS |= {"of_stage_2": ".2f", "of_fsdp2": ".2f", "fetched_mib": ".0f", "fetches": ".1f", "waits": ".1f"}


make_parser = partial(new_parser, "bench.residency", __doc__, *TRAINING, "ranks", "seconds", "png")


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)

    def rows_at(world_size: int) -> list[Row]:
        training = training_of(args, batch=1)
        rows, seen = on_ranks(time_on_ranks, world_size, training, args.seconds / len(args.ranks))
        weigh(training, world_size, rows)
        if world_size == args.ranks[0]:
            save_residency(seen, f"parameters resident in a step, {world_size} ranks", args.png)
        return rows

    for_world_sizes(args, COLUMNS, rows_at)


if __name__ == "__main__":
    main()
