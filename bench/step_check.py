"""The model of a step beside measured steps: what goes in and what should come out, in turn on the same ranks.

    python -m bench.step_check [--ranks 2 4] [--layers 8] [--rounds 15] [--json FILE] [--png FILE]

What goes in: when each gradient is there where nothing is sent, and what one bucket alone costs, at several sizes: to
be exchanged and summed, updated, and gathered. Nothing is fitted to the steps that are predicted. ZEROX_EXCHANGE
chooses the exchange, as in any training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.common import Row, Spread, largest, new_parser, on_ranks, parse, print_rows, write_result
from bench.plots import save_bars
from bench.step_model import Flight, Line, Outcome, Place, predict
from bench.systems import NoCommunication, Training, Zerox
from bench.timing import Timing
from zerox import FusedShardedAdam
from zerox.options import Options

Seconds = dict[tuple[object, ...], float]  # of one round, by what took them
KIB, MIB = 2**10, 2**20
PROBED_BYTES = (64 * KIB, MIB, 4 * MIB, 16 * MIB)
ALONE, TOGETHER = "alone", "together"
LEAST_S = 1e-6  # what a difference of two times is at least
FLOOR, STEP, COMPUTE = ("floor",), ("step",), ("compute",)


class Probe:
    """One bucket, and nothing else to do."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup | None) -> None:
        self.param = nn.Parameter(torch.zeros(nbytes // 4))
        self.optimizer = FusedShardedAdam([self.param], process_group=group, bucket_cap_mb=nbytes / MIB)

    def sample(self) -> dict[str, float]:
        """Seconds of a flight and of step(), without the ranks' agreement ("settle"); and of CPU, of all threads."""
        loss = Spread.apply([torch.ones_like(self.param)], self.param)
        self.optimizer.synchronize()
        dist.barrier()
        times = [(time.perf_counter(), time.process_time())]
        for part in (loss.backward, self.optimizer.synchronize, self.optimizer.synchronize, self.optimizer.step):
            part()
            times.append((time.perf_counter(), time.process_time()))
        self.optimizer.zero_grad()
        wall, cpu = ([after - before for before, after in pairwise(clock)] for clock in zip(*times, strict=True))
        return {
            "flight": wall[0] + wall[1] - wall[2],
            "flight_cpu": cpu[0] + cpu[1] - cpu[2],
            "settle": wall[2],
            "step": wall[3] - wall[2],
            "step_cpu": cpu[3] - cpu[2],
        }


class ComputeProbe:
    """A step where nothing is sent: when each gradient is there, and when backward and all of it end."""

    def __init__(self, training: Training) -> None:
        self.system = NoCommunication(training)
        self.seen: dict[int, float] = {}
        for index, param in enumerate(self.system.module.parameters()):
            param.register_post_accumulate_grad_hook(partial(self._note, index))

    def _note(self, index: int, _: Tensor) -> None:
        self.seen[index] = time.perf_counter()

    def sample(self, tokens: Tensor) -> Seconds:
        self.system.module.zero_grad()
        self.system.optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self.system.module(tokens[:, :-1], tokens[:, 1:]).backward()
        found: Seconds = {("arrival", index): seen - start for index, seen in self.seen.items()}
        found[COMPUTE] = time.perf_counter() - start
        self.system.optimizer.step()
        found[FLOOR] = time.perf_counter() - start
        return found


def measure(training: Training, rounds: int) -> list[Seconds]:
    """On each rank: what the slowest rank took in each round."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups: list[Any] = [dist.new_group([each]) for each in range(world_size)]
    compute, system = ComputeProbe(training), Zerox(training)
    places = {ALONE: groups[rank], TOGETHER: None}
    probes = {(place, nbytes): Probe(nbytes, places[place]) for place in places for nbytes in PROBED_BYTES}
    found: list[Seconds] = []
    for index in range(rounds + 1):
        tokens = training.batches(index, rank)
        seconds = compute.sample(tokens[0])
        dist.barrier()
        start = time.perf_counter()
        system.step(tokens)
        seconds[STEP] = time.perf_counter() - start
        for key, probe in probes.items():
            seconds |= {(*key, part): taken for part, taken in probe.sample().items()}
        keys = sorted(seconds, key=str)  # hooks may have run in another order on another rank
        found.append(dict(zip(keys, largest([seconds[key] for key in keys]), strict=True)))
    return found[1:]  # the first round warms up


class Model:
    """The step that measured parts make, in the medians of the rounds. Lines over a bucket's bytes."""

    def __init__(self, rounds: list[Seconds], training: Training, world_size: int) -> None:
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        cores = len(os.sched_getaffinity(0))

        def cost(nbytes: int, part: str) -> float:
            """What it takes of the rank's share of the machine, whichever of its threads: or longer, if it waits."""
            wall, cpu = median[TOGETHER, nbytes, part], median[TOGETHER, nbytes, f"{part}_cpu"]
            return max(LEAST_S, wall, cpu * world_size / cores)

        self.update = Line.through((nbytes, max(LEAST_S, median[ALONE, nbytes, "step"])) for nbytes in PROBED_BYTES)
        self.flight = Line.through((nbytes, cost(nbytes, "flight")) for nbytes in PROBED_BYTES)
        self.gather = Line.through(
            (nbytes, max(LEAST_S, cost(nbytes, "step") - self.update(nbytes / world_size))) for nbytes in PROBED_BYTES
        )
        settle_s = statistics.median(median[TOGETHER, nbytes, "settle"] for nbytes in PROBED_BYTES)
        # Compute was measured with all ranks on the machine: a core's worth of its speed is what a rank then had.
        place = Place(median[COMPUTE], settle_s=settle_s, cores=max(1.0, cores / world_size))
        named = list(training.model().named_parameters())
        plans = Options().plan([name for name, _ in named], [param for _, param in named], "gloo", world_size)
        flights = []
        for plan in plans:
            nbytes = plan.layout.numel * 4
            ready_s = min(max(median["arrival", index] for index in plan.params), place.compute_s)
            costs = self.flight(nbytes), self.update(nbytes / world_size), self.gather(nbytes)
            flights.append(Flight(ready_s, land_s=costs[0], update_s=costs[1], take_s=costs[2]))
        self.place = place
        self.outcome: Outcome = predict(place, sorted(flights, key=lambda flight: flight.ready_s))


def row_of(rounds: list[Seconds], training: Training, world_size: int) -> Row:
    model = Model(rounds, training, world_size)
    timing = Timing.of([1e3 * each[STEP] for each in rounds])
    floor_ms = statistics.median(each[FLOOR] for each in rounds) * 1e3
    # What else the machine does falls on all of a round: as slow as it was where the model's numbers were taken.
    steady_ms = floor_ms * statistics.median(each[STEP] / each[FLOOR] for each in rounds)
    predicted_ms, alone_ms = model.outcome.step_s * 1e3, model.outcome.alone_s * 1e3
    return {
        "ranks": world_size,
        "buckets": len(model.outcome.left_s),
        "measured_ms": timing.p50_ms,
        "spread": timing.spread,
        "steady_ms": steady_ms,
        "predicted_ms": predicted_ms,
        "error": predicted_ms / steady_ms - 1,
        "floor_ms": floor_ms,
        "compute_ms": model.place.compute_s * 1e3,
        "alone_ms": alone_ms,
        "exposed_ms": steady_ms - alone_ms,
        "predicted_exposed_ms": model.outcome.exposed_s * 1e3,
        **{f"{name}_fixed_us": getattr(model, name).fixed_s * 1e6 for name in ("flight", "gather", "update")},
        **{f"{name}_ns_a_byte": getattr(model, name).per_byte_s * 1e9 for name in ("flight", "gather", "update")},
    }


COLUMNS = {"ranks": "", "measured_ms": ".1f", "spread": ".1%", "steady_ms": ".1f", "predicted_ms": ".1f"}
COLUMNS |= {"error": "+.1%", "compute_ms": ".1f", "exposed_ms": ".1f", "predicted_exposed_ms": ".1f"}


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("bench.step_check", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    parser.add_argument("--layers", type=int, default=Training.layers, help="of the GPT (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training = Training(layers=args.layers, batch=1)
    print("steady: without drift, as a multiple of the floor round by round; exposed: beyond compute and updates")
    rows: list[Row] = []
    for world_size in args.ranks:
        rows.append(row_of(on_ranks(measure, world_size, training, args.rounds), training, world_size))
        print_rows(rows[-1:], COLUMNS, header=len(rows) == 1)
    write_result(args.json, "bench.step_check", argv, rows)
    shown = {"measured": "steady_ms", "model": "predicted_ms", "compute and own updates": "alone_ms"}
    bars = [(f"{row['ranks']} ranks", name, row[key]) for row in rows for name, key in shown.items()]
    save_bars(bars, "a training step and the model of it, ms", args.png)


if __name__ == "__main__":
    main()
