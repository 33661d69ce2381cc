"""The model of a step beside measured steps: what goes in and what should come out, in turn on the same ranks.

What goes in: when each gradient is there where nothing is sent, and what one bucket alone costs, at several sizes: to
be exchanged and summed, updated, and gathered. Nothing is fitted to the steps that are predicted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from bench.probes import Compute, ComputeProbe, Probe, exchange_chosen, meet
from bench.ranks import largest, on_ranks
from bench.step_model import Flight, Line, Outcome, Place, predict
from bench.systems import NoCommunication, Training, Zerox
from bench.timing import Timing
from bench.traffic import EXCHANGES
from zerox.options import Options

Row = dict[str, Any]
KIB, MIB = 2**10, 2**20
PROBED_BYTES = (64 * KIB, MIB, 4 * MIB, 16 * MIB)
ALONE = "alone"
LEAST_S = 1e-6  # what a difference of two times is at least
FLOOR = NoCommunication.name


@dataclass(frozen=True)
class Measured:
    """Medians, over rounds, of the slowest rank's seconds. Lines over a bucket's bytes; ``update`` over the shard's."""

    world_size: int
    cores: int
    compute: Compute
    update: Line
    settle_s: dict[str, float]
    flight: dict[str, Line]
    gather: dict[str, Line]
    steps_s: dict[str, list[float]]  # by exchange, and without any: the same index is the same round

    def place(self, exchange: str) -> Place:
        """Compute was measured with all ranks on the machine: a core's worth of its speed is what a rank then had."""
        return Place(self.compute.end_s, settle_s=self.settle_s[exchange], cores=max(1.0, self.cores / self.world_size))

    def flights(self, training: Training, exchange: str) -> list[Flight]:
        named = list(training.model().named_parameters())
        plans = Options().plan([name for name, _ in named], [param for _, param in named], "gloo", self.world_size)
        found = []
        for plan in plans:
            nbytes = plan.layout.numel * 4
            found.append(
                Flight(
                    ready_s=min(max(self.compute.arrivals_s[index] for index in plan.params), self.compute.end_s),
                    land_s=self.flight[exchange](nbytes),
                    update_s=self.update(nbytes / self.world_size),
                    take_s=self.gather[exchange](nbytes),
                )
            )
        return sorted(found, key=lambda flight: flight.ready_s)

    def predicted(self, training: Training, exchange: str) -> Outcome:
        return predict(self.place(exchange), self.flights(training, exchange))


def measure(training: Training, rounds: int) -> Measured:
    """On each rank."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups: list[Any] = [dist.new_group([each]) for each in range(world_size)]
    compute = ComputeProbe(training)
    systems: dict[str, Zerox] = {}
    probes = {(ALONE, nbytes): Probe(nbytes, groups[rank]) for nbytes in PROBED_BYTES}
    for exchange in EXCHANGES:
        with exchange_chosen(exchange):
            systems[exchange] = Zerox(training)
            probes |= {(exchange, nbytes): Probe(nbytes, None) for nbytes in PROBED_BYTES}
    arrivals: list[list[float]] = []
    steps: dict[str, list[float]] = {name: [] for name in (FLOOR, *EXCHANGES)}
    parts: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in probes}
    for index in range(rounds + 1):
        tokens = training.batches(index, rank)
        computed, whole = compute.sample(tokens[0])
        sample = {FLOOR: whole}
        for exchange, system in systems.items():
            sample[exchange] = _seconds(partial(system.step, tokens))
        found = {key: probe.sample() for key, probe in probes.items()}
        if index == 0:  # the first round warms up
            continue
        arrivals.append([*computed.arrivals_s, computed.end_s])
        for name, seconds in sample.items():
            steps[name].append(seconds)
        for key, each in found.items():
            parts[key].append(each)
    return summary(world_size, _slowest(arrivals), {name: largest(each) for name, each in steps.items()}, parts)


def _seconds(function: Callable[[], object]) -> float:
    meet()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _slowest(samples: list[list[float]]) -> list[float]:
    """Column by column: the median of the slowest ranks'. Collective."""
    return [statistics.median(column) for column in zip(*(largest(each) for each in samples), strict=True)]


def summary(
    world_size: int,
    arrivals: list[float],
    steps: dict[str, list[float]],
    parts: Mapping[tuple[str, int], list[dict[str, float]]],
) -> Measured:
    """Collective."""
    cores = len(os.sched_getaffinity(0))
    median: dict[tuple[str, int], dict[str, float]] = {}
    for key, samples in parts.items():
        names = list(samples[0])
        median[key] = dict(zip(names, _slowest([list(each.values()) for each in samples]), strict=True))

    def cost(key: tuple[str, int], part: str) -> float:
        """What it takes of the rank's share of the machine, whichever of its threads: or longer, if it waits."""
        return max(LEAST_S, median[key][part], median[key][f"{part}_cpu"] * world_size / cores)

    update = Line.through((nbytes, max(LEAST_S, median[ALONE, nbytes]["step"])) for nbytes in PROBED_BYTES)
    settle, flight, gather = {}, {}, {}
    for exchange in EXCHANGES:
        settle[exchange] = statistics.median(median[exchange, nbytes]["settle"] for nbytes in PROBED_BYTES)
        flight[exchange] = Line.through((nbytes, cost((exchange, nbytes), "flight")) for nbytes in PROBED_BYTES)
        gather[exchange] = Line.through(
            (nbytes, max(cost((exchange, nbytes), "step") - update(nbytes / world_size), LEAST_S))
            for nbytes in PROBED_BYTES
        )
    return Measured(world_size, cores, Compute(arrivals[:-1], arrivals[-1]), update, settle, flight, gather, steps)


def rows_of(measured: Measured, training: Training) -> list[Row]:
    rows = []
    for exchange in EXCHANGES:
        outcome = measured.predicted(training, exchange)
        steps_s, floors_s = measured.steps_s[exchange], measured.steps_s[FLOOR]
        timing = Timing.of([1e3 * each for each in steps_s])
        # What else the machine does falls on all of a round: as slow as it was where the model's numbers were taken.
        over_floor = statistics.median(a / b for a, b in zip(steps_s, floors_s, strict=True))
        steady_ms = over_floor * statistics.median(floors_s) * 1e3
        flight, gather = measured.flight[exchange], measured.gather[exchange]
        rows.append(
            {
                "part": "step",
                "ranks": measured.world_size,
                "exchange": exchange,
                "buckets": len(outcome.left_s),
                "measured_ms": timing.p50_ms,
                "spread": timing.spread,
                "predicted_ms": outcome.step_s * 1e3,
                "steady_ms": steady_ms,
                "error": outcome.step_s * 1e3 / steady_ms - 1,
                "compute_ms": measured.compute.end_s * 1e3,
                "alone_ms": outcome.alone_s * 1e3,
                "exposed_ms": steady_ms - outcome.alone_s * 1e3,
                "predicted_exposed_ms": outcome.exposed_s * 1e3,
                "floor_ms": statistics.median(floors_s) * 1e3,
                "settle_us": measured.settle_s[exchange] * 1e6,
                "flight_fixed_us": flight.fixed_s * 1e6,
                "flight_gb_per_s": _rate(flight),
                "gather_fixed_us": gather.fixed_s * 1e6,
                "gather_gb_per_s": _rate(gather),
                "update_gb_per_s": _rate(measured.update),
            }
        )
    return rows


def _rate(line: Line) -> float | None:
    """Of a bucket's bytes, in GB/s."""
    return 1e-9 / line.per_byte_s if line.per_byte_s else None


HEADER = (
    f"{'ranks':>5}  {'exchange':<9} {'measured ms':>11} {'spread':>7} {'steady':>8} {'model ms':>9} {'error':>7}   "
    f"{'compute':>8} {'exposed':>8} {'model':>7}   {'flight':>17} {'gather':>17}"
)


def line(row: Row) -> str:
    def cost(kind: str) -> str:
        rate = row[f"{kind}_gb_per_s"]
        return f"{row[f'{kind}_fixed_us']:,.0f} + {'-' if rate is None else f'{rate:.2f}'}"

    return (
        f"{row['ranks']:>5}  {row['exchange']:<9} {row['measured_ms']:>11.1f} {row['spread']:>7.1%} "
        f"{row['steady_ms']:>8.1f} "
        f"{row['predicted_ms']:>9.1f} {row['error']:>+7.1%}   {row['compute_ms']:>8.1f} {row['exposed_ms']:>8.1f} "
        f"{row['predicted_exposed_ms']:>7.1f}   {cost('flight'):>17} {cost('gather'):>17}"
    )


def run(world_sizes: list[int], training: Training, rounds: int) -> list[Row]:
    print(
        "The model beside measured steps, ms. steady: with drift taken out, as a multiple of the floor round by round;"
    )
    print(
        "exposed: beyond compute and the updates of own shards; a bucket's flight and gather: us + its bytes at GB/s."
    )
    print(HEADER)
    rows: list[Row] = []
    for world_size in world_sizes:
        found = rows_of(on_ranks(measure, world_size, training, rounds), training)
        rows += found
        print("\n".join(line(row) for row in found), flush=True)
    return rows
