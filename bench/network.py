"""Direct and native exchange on a network described by a few numbers: where each wins, and what buckets it wants.

    python -m bench.network [--latency-us 25] [--bandwidth-gb-s 12.5] [--post-us 10] [--backend nccl] [--json FILE]

A round is a bucket's reduce-scatter and all-gather, of ``s`` bytes for each of ``W`` ranks:

    direct     each way the host posts 2 (W - 1) messages while the wire moves (W - 1) s bytes: whichever takes longer,
               and one latency. The owner sums W slices.
    ring       W - 1 steps each way, one after the other: each a latency and s bytes, summed on arrival.
    log steps  recursive halving and doubling: log2 W latencies each way, the same (W - 1) s bytes.

Left out: congestion where W - 1 messages meet at one receiver, and faster links inside a machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from bench.common import Row, new_parser, parse, print_rows, write_result
from bench.shapes import MODELS, named_parameters
from bench.step_model import Flight, Place, predict
from zerox.plan.buckets import MIB, BucketPlan, ParamSpec, default_cap_bytes, plan_buckets

KIB = 2**10
GIB = 2**30
ITEMSIZE = 2
MOST_SLICE_BYTES = 64 * MIB
# For bucket sizes a rank is a device: 8,192 tokens a step at 400 TFLOP/s, and copies at 1 TB/s beside them.
TOKENS, FLOPS, DEVICE_COPY_BYTES_PER_S = 8_192, 400e12, 1e12
SLACK = 1.01  # within this the two are as fast: both wait for the wire alone


@dataclass(frozen=True)
class Network:
    """``latency_s`` of a message between two ranks' programs, ``bytes_per_s`` each way of a rank's link.

    ``post_s``: of the host, to post a message to be sent or received. ``copy_bytes_per_s``: of packing, and of summing
    what has arrived.
    """

    latency_s: float = 25e-6
    bytes_per_s: float = 12.5e9
    post_s: float = 10e-6
    copy_bytes_per_s: float = 10e9


def direct_s(net: Network, world_size: int, slice_bytes: float) -> float:
    way_s = (world_size - 1) * max(2 * net.post_s, slice_bytes / net.bytes_per_s) + net.latency_s
    return 2 * way_s + _sum_s(net, world_size, slice_bytes)


def ring_s(net: Network, world_size: int, slice_bytes: float) -> float:
    step_s = net.latency_s + 2 * net.post_s + slice_bytes / net.bytes_per_s
    return 2 * (world_size - 1) * step_s + _sum_s(net, world_size, slice_bytes)


def log_steps_s(net: Network, world_size: int, slice_bytes: float) -> float:
    steps, others = math.ceil(math.log2(world_size)), world_size - 1
    way = steps * (net.latency_s + 2 * net.post_s) + others * slice_bytes / net.bytes_per_s
    return 2 * way + _sum_s(net, world_size, slice_bytes)


def _sum_s(net: Network, world_size: int, slice_bytes: float) -> float:
    return (world_size - 1) * slice_bytes / net.copy_bytes_per_s


RIVALS: dict[str, Callable[[Network, int, float], float]] = {"ring": ring_s, "log_steps": log_steps_s}


def bound_bytes(net: Network, world_size: int, rival: str) -> int:
    """The slice from which on direct is no slower than the rival; 0 where it never is, at most MOST_SLICE_BYTES.

    What direct loses to fixed costs shrinks with the slice, so there is one crossing.
    """
    native = RIVALS[rival]
    if direct_s(net, world_size, 1) <= native(net, world_size, 1):
        return 0
    least, most = 1, MOST_SLICE_BYTES
    while least < most:
        middle = (least + most) // 2
        if direct_s(net, world_size, middle) <= SLACK * native(net, world_size, middle):
            most = middle
        else:
            least = middle + 1
    return least


def bounds(net: Network, world_sizes: Sequence[int]) -> list[Row]:
    """Microseconds of a round of some slices, and the slice below which each rival wins, in KiB."""
    rows: list[Row] = []
    for world_size, nbytes in itertools.product(world_sizes, (4 * KIB, 64 * KIB, MIB)):
        row: Row = {"part": "bound", "ranks": world_size, "slice_kib": nbytes / KIB}
        row["direct_us"] = direct_s(net, world_size, nbytes) * 1e6
        for name, native in RIVALS.items():
            row[f"{name}_us"] = native(net, world_size, nbytes) * 1e6
            row[f"{name}_wins_below"] = bound_bytes(net, world_size, name) / KIB
        rows.append(row)
    return rows


def flights_of(net: Network, plans: Sequence[BucketPlan], numel: int, compute_s: float, exchange: str) -> list[Flight]:
    """Gradients come in the order of buckets, each after its share of backward, two thirds of compute."""
    flights, done = [], 0
    for plan in plans:
        layout = plan.layout
        world_size, shard_bytes = layout.world_size, layout.shard_numel * ITEMSIZE
        others, done = world_size - 1, done + sum(layout.numels)
        bytes_s, posts_s = others * shard_bytes / net.bytes_per_s, 2 * others * net.post_s
        steps_s = others * (net.latency_s + 2 * net.post_s)
        direct = exchange == "direct"
        way_s = max(bytes_s, posts_s) if direct else bytes_s + steps_s
        slices = world_size if direct else 0  # a ring sums as slices pass
        flights.append(
            Flight(
                ready_s=min(compute_s, compute_s * (1 / 3 + 2 / 3 * done / numel)),
                pack_s=world_size * shard_bytes / net.copy_bytes_per_s,
                scatter_s=way_s,
                land_s=slices * shard_bytes / net.copy_bytes_per_s,
                gather_s=way_s,
            )
        )
    return flights


def caps(world_size: int, backend: str) -> list[int]:
    """Bucket sizes to try: the default, and from 4 MiB to 16 GiB."""
    return sorted({default_cap_bytes(backend, world_size), *(4 * MIB * 4**power for power in range(7))})


def sweep(net: Network, model: str, world_size: int, backend: str, exchange: str) -> list[Row]:
    """The step's time over the bucket size, and the memory that buckets take on their way."""
    named = named_parameters(model, torch.bfloat16)
    total = sum(param.numel() for _, param in named)
    net = replace(net, copy_bytes_per_s=DEVICE_COPY_BYTES_PER_S)
    specs = [ParamSpec(name, param.numel(), "bf16", ITEMSIZE) for name, param in named]
    compute_s = 6 * total * TOKENS / FLOPS
    rows = []
    for cap in caps(world_size, backend):
        plans = plan_buckets(specs, world_size, cap)
        flights = flights_of(net, plans, total, compute_s, exchange)
        outcome = predict(Place(compute_s, latency_s=net.latency_s, cores=8.0), flights)
        largest = max(plan.layout.numel for plan in plans) * ITEMSIZE
        rows.append(
            {
                "part": "cap",
                "model": model,
                "ranks": world_size,
                "exchange": exchange,
                "cap_mib": cap / MIB,
                "default": "default" if cap == default_cap_bytes(backend, world_size) else "",
                "buckets": len(plans),
                "slice_kib": largest / world_size / KIB,
                "step_s": outcome.step_s,
                "compute_s": compute_s,
                "buffer_gib": 2 * largest * (2 if exchange == "direct" else 1) / GIB,
            }
        )
    return rows


def sweeps(net: Network, models: Sequence[str], world_sizes: Sequence[int], backend: str) -> list[Row]:
    rows = []
    for model, exchange, world_size in itertools.product(models, ("direct", "ring"), world_sizes):
        found = sweep(net, model, world_size, backend, exchange)
        best_s = min(row["step_s"] for row in found)
        rows += [{**row, "over_best": row["step_s"] / best_s} for row in found]
    return rows


BOUND_COLUMNS = {"ranks": ",", "slice_kib": ",.0f", "direct_us": ",.0f"}
BOUND_COLUMNS |= {f"{name}_{what}": ",.0f" for name in RIVALS for what in ("us", "wins_below")}
SWEEP_COLUMNS = {"model": "<10", "ranks": ",", "exchange": "<8", "cap_mib": ",.0f", "default": "<7", "buckets": ","}
SWEEP_COLUMNS |= {"slice_kib": ",.0f", "step_s": ".3f", "over_best": ".2f", "buffer_gib": ".2f"}


OWN = {
    "latency_us": {"type": float, "default": 25.0, "help": "of a message"},
    "bandwidth_gb_s": {"type": float, "default": 12.5, "help": "of a rank's link"},
    "post_us": {"type": float, "default": 10.0, "help": "of the host, to post a message"},
    "backend": {"choices": ["gloo", "nccl"], "default": "gloo", "help": "of plans"},
    "models": {"nargs": "+", "choices": list(MODELS), "default": ["gpt2-124m", "llama-8b"], "metavar": "MODEL"},
}


def main(argv: list[str] | None = None) -> None:
    args = parse(new_parser("bench.network", __doc__, "ranks", ranks=[64, 256, 1_024], **OWN), argv)
    net = Network(latency_s=args.latency_us / 1e6, bytes_per_s=args.bandwidth_gb_s * 1e9, post_s=args.post_us / 1e6)
    print("A round by the formulas, and the slice in KiB below which others are faster than direct; 0: nowhere")
    rows = bounds(net, args.ranks)
    print_rows(rows, BOUND_COLUMNS, header=True)
    print(f"The model's step over the bucket size; {TOKENS:,} tokens a rank, a device of {FLOPS / 1e12:.0f} TFLOP/s")
    swept = sweeps(net, args.models, args.ranks, args.backend)
    print_rows(swept, SWEEP_COLUMNS, header=True)
    write_result(args, [*rows, *swept], network=asdict(net))


if __name__ == "__main__":
    main()
