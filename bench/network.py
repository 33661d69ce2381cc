"""Direct and native exchange on a network described by a few numbers: where each wins, and what buckets it wants.

    python -m bench.network [--latency-us 25] [--bandwidth-gb-s 12.5] [--post-us 10] [--backend nccl] [--json FILE]

A round is a bucket's reduce-scatter and all-gather, of ``s`` bytes for each of ``W`` ranks:

    direct     each way the host posts 2 (W - 1) messages while the wire moves (W - 1) s bytes: whichever takes longer,
               and one latency. The owner sums W slices.
    ring       W - 1 steps each way, one after the other: each a latency and s bytes, summed on arrival.
    log steps  recursive halving and doubling: log2 W latencies each way, the same (W - 1) s bytes.

Left out: congestion where W - 1 messages meet at one receiver, faster links inside a machine, and of steps ranks that
are late, and threads that share cores or memory bandwidth.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.common import Row, new_parser, parse, print_rows, write_result
from zerox.plan.buckets import MIB, BucketPlan, ParamSpec, default_cap_bytes, plan_buckets

KIB = 2**10
GIB = 2**30
ITEMSIZE = 2
MOST_SLICE_BYTES = 64 * MIB
# For bucket sizes a rank is a device: 8,192 tokens a step at 400 TFLOP/s, and copies at 1 TB/s beside them.
TOKENS, FLOPS, DEVICE_COPY_BYTES_PER_S = 8_192, 400e12, 1e12
SLACK = 1.01  # within this the two are as fast: both wait for the wire alone
RIVALS = ("ring", "log_steps")  # of direct


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


# ---- rounds


def way_s(net: Network, exchange: str, world_size: int, slice_bytes: float) -> float:
    """One way of a round; of direct without its latency."""
    others = world_size - 1
    bytes_s = others * slice_bytes / net.bytes_per_s
    if exchange == "direct":
        return max(others * 2 * net.post_s, bytes_s)
    steps = others if exchange == "ring" else math.ceil(math.log2(world_size))
    return steps * (net.latency_s + 2 * net.post_s) + bytes_s


def round_s(net: Network, exchange: str, world_size: int, slice_bytes: float) -> float:
    latency_s = net.latency_s if exchange == "direct" else 0.0
    sum_s = (world_size - 1) * slice_bytes / net.copy_bytes_per_s
    return 2 * (way_s(net, exchange, world_size, slice_bytes) + latency_s) + sum_s


def bound_bytes(net: Network, world_size: int, rival: str) -> int:
    """The slice from which on direct is no slower than the rival; 0 where it never is, at most MOST_SLICE_BYTES.

    What direct loses to fixed costs shrinks with the slice, so there is one crossing.
    """
    if round_s(net, "direct", world_size, 1) <= round_s(net, rival, world_size, 1):
        return 0
    least, most = 1, MOST_SLICE_BYTES
    while least < most:
        middle = (least + most) // 2
        if round_s(net, "direct", world_size, middle) <= SLACK * round_s(net, rival, world_size, middle):
            most = middle
        else:
            least = middle + 1
    return least


def bounds(net: Network, world_sizes: Sequence[int]) -> list[Row]:
    """Microseconds of a round of some slices, and the slice below which each rival wins, in KiB."""
    rows: list[Row] = []
    for world_size, nbytes in itertools.product(world_sizes, (4 * KIB, 64 * KIB, MIB)):
        row: Row = {"part": "bound", "ranks": world_size, "slice_kib": nbytes / KIB}
        row |= {f"{name}_us": round_s(net, name, world_size, nbytes) * 1e6 for name in ("direct", *RIVALS)}
        rows.append(row | {f"{name}_wins_below": bound_bytes(net, world_size, name) / KIB for name in RIVALS})
    return rows


# ---- models: their parameters, as transformers builds them on the meta device, are enough for a plan, and no memory

LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 128}
# As published: the type of transformers' configuration, and its options.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", {}),
    "llama-8b": ("llama", {**LLAMA, "num_hidden_layers": 32, "hidden_size": 4_096, "intermediate_size": 14_336}),
    "llama-70b": ("llama", {**LLAMA, "num_hidden_layers": 80, "hidden_size": 8_192, "intermediate_size": 28_672}),
    "llama-405b": ("llama", {**LLAMA, "num_hidden_layers": 126, "hidden_size": 16_384, "intermediate_size": 53_248}),
}


def named_parameters(model: str, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """In registration order, tied weights once. ``model``: a key of MODELS. SystemExit without transformers."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError:
        sys.exit("bench.network builds its models with transformers: pip install transformers")
    kind, options = MODELS[model]
    heads = {"num_attention_heads": options["hidden_size"] // options["head_dim"]} if options else {}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options, **heads), dtype=dtype)
    return list(made.named_parameters())


# ---- a step


@dataclass(frozen=True)
class Flight:
    """One bucket. ``ready_s``: of the rank's compute when its last gradient is there.

    Seconds that the parts of its way take: ``pack_s``, copies; ``way_s``, on the wire, and again for the gather;
    ``reduce_s``, summing.
    """

    ready_s: float
    pack_s: float = 0.0
    way_s: float = 0.0
    reduce_s: float = 0.0


def step_s(flights: Sequence[Flight], compute_s: float, latency_s: float) -> float:
    """From the start of forward to the last parameter. ``flights`` in launch order.

    All ranks do the same at the same time. Workers run beside the compute. As Note [Two workers] has it, one packs, one
    is reduced, and two flights at most have buffers. The wire moves one bucket after the other, and a latency does not
    hold it up. Gathers leave when all have been reduced.
    """
    packed_s = wire_s = 0.0
    reduced_s = [0.0, 0.0]
    for flight in flights:
        packed_s = max(flight.ready_s, packed_s, reduced_s[-2]) + flight.pack_s
        wire_s = max(packed_s, wire_s) + flight.way_s
        reduced_s.append(max(wire_s + latency_s, reduced_s[-1]) + flight.reduce_s)
    return max(compute_s, reduced_s[-1]) + sum(flight.way_s for flight in flights) + latency_s


def flights_of(net: Network, plans: Sequence[BucketPlan], numel: int, compute_s: float, exchange: str) -> list[Flight]:
    """Gradients come in the order of buckets, each after its share of backward, two thirds of compute."""
    flights, done = [], 0
    for plan in plans:
        world_size, shard_bytes = plan.layout.world_size, plan.layout.shard_numel * ITEMSIZE
        done += sum(plan.layout.numels)
        copy_s = world_size * shard_bytes / net.copy_bytes_per_s
        flights.append(
            Flight(
                ready_s=min(compute_s, compute_s * (1 / 3 + 2 / 3 * done / numel)),
                pack_s=copy_s,
                way_s=way_s(net, exchange, world_size, shard_bytes),
                reduce_s=copy_s if exchange == "direct" else 0.0,  # a ring sums as slices pass
            )
        )
    return flights


def sweep(net: Network, model: str, world_size: int, backend: str, exchange: str) -> list[Row]:
    """The step's time over bucket sizes from 4 MiB to 16 GiB, and the memory that buckets take on their way."""
    named = named_parameters(model, torch.bfloat16)
    total = sum(param.numel() for _, param in named)
    net = replace(net, copy_bytes_per_s=DEVICE_COPY_BYTES_PER_S)
    specs = [ParamSpec(name, param.numel(), "bf16", ITEMSIZE) for name, param in named]
    compute_s = 6 * total * TOKENS / FLOPS
    default = default_cap_bytes(backend, world_size)
    rows: list[Row] = []
    for cap in sorted({default, *(4 * MIB * 4**power for power in range(7))}):
        plans = plan_buckets(specs, world_size, cap)
        largest = max(plan.layout.numel for plan in plans) * ITEMSIZE
        rows.append(
            {
                "part": "cap",
                "model": model,
                "ranks": world_size,
                "exchange": exchange,
                "cap_mib": cap / MIB,
                "default": "default" if cap == default else "",
                "buckets": len(plans),
                "slice_kib": largest / world_size / KIB,
                "step_s": step_s(flights_of(net, plans, total, compute_s, exchange), compute_s, net.latency_s),
                "compute_s": compute_s,
                "buffer_gib": 2 * largest * (2 if exchange == "direct" else 1) / GIB,
            }
        )
    best_s = min(row["step_s"] for row in rows)
    return [{**row, "over_best": row["step_s"] / best_s} for row in rows]


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
    cases = itertools.product(args.models, ("direct", "ring"), args.ranks)
    swept = [row for model, exchange, ranks in cases for row in sweep(net, model, ranks, args.backend, exchange)]
    print_rows(swept, SWEEP_COLUMNS, header=True)
    write_result(args, [*rows, *swept], network=asdict(net))


if __name__ == "__main__":
    main()
