"""Direct and native exchange on a network described by a few numbers: which slices each is faster for.

    python -m bench.network [--latency-us 25] [--bandwidth-gb-s 12.5] [--post-us 10] [--ranks 64 1024] [--json FILE]

A round is a bucket's reduce-scatter and all-gather, of ``s`` bytes for each of ``W`` ranks:

    direct     each way the host posts 2 (W - 1) messages while the wire moves (W - 1) s bytes: whichever takes longer,
               and one latency. The owner sums W slices.
    ring       W - 1 steps each way, one after the other: each a latency and s bytes, summed on arrival.
    gloo       its reduce-scatter copies the bucket, runs a ring all-reduce (2 (W - 1) steps), and copies a slice out.
    log steps  recursive halving and doubling: log2 W latencies each way, the same (W - 1) s bytes.

Left out: congestion where W - 1 messages meet at one receiver, and faster links inside a machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench.common import Row, new_parser, parse, print_rows, write_result
from zerox.plan.buckets import MIB

KIB = 2**10
MOST_SLICE_BYTES = 64 * MIB
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
    others = world_size - 1
    return 2 * others * _step_s(net, slice_bytes) + _sum_s(net, world_size, slice_bytes)


def gloo_s(net: Network, world_size: int, slice_bytes: float) -> float:
    others = world_size - 1
    copies_s = (world_size + 1) * slice_bytes / net.copy_bytes_per_s
    return 3 * others * _step_s(net, slice_bytes) + _sum_s(net, world_size, slice_bytes) + copies_s


def log_steps_s(net: Network, world_size: int, slice_bytes: float) -> float:
    steps, others = math.ceil(math.log2(world_size)), world_size - 1
    way = steps * (net.latency_s + 2 * net.post_s) + others * slice_bytes / net.bytes_per_s
    return 2 * way + _sum_s(net, world_size, slice_bytes)


def _sum_s(net: Network, world_size: int, slice_bytes: float) -> float:
    return (world_size - 1) * slice_bytes / net.copy_bytes_per_s


def _step_s(net: Network, slice_bytes: float) -> float:
    return net.latency_s + 2 * net.post_s + slice_bytes / net.bytes_per_s


RIVALS: dict[str, Callable[[Network, int, float], float]] = {"ring": ring_s, "gloo": gloo_s, "log_steps": log_steps_s}


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
        row: Row = {"ranks": world_size, "slice_kib": nbytes / KIB}
        row["direct_us"] = direct_s(net, world_size, nbytes) * 1e6
        for name, native in RIVALS.items():
            row[f"{name}_us"] = native(net, world_size, nbytes) * 1e6
            row[f"{name}_wins_below"] = bound_bytes(net, world_size, name) / KIB
        rows.append(row)
    return rows


COLUMNS = {"ranks": ",", "slice_kib": ",.0f", "direct_us": ",.0f"}
COLUMNS |= {f"{name}_{what}": ",.0f" for name in RIVALS for what in ("us", "wins_below")}

OWN = {
    "latency_us": {"type": float, "default": 25.0, "help": "of a message"},
    "bandwidth_gb_s": {"type": float, "default": 12.5, "help": "of a rank's link"},
    "post_us": {"type": float, "default": 10.0, "help": "of the host, to post a message"},
}


def main(argv: list[str] | None = None) -> None:
    args = parse(new_parser("bench.network", __doc__, "ranks", ranks=[64, 256, 1_024], **OWN), argv)
    net = Network(latency_s=args.latency_us / 1e6, bytes_per_s=args.bandwidth_gb_s * 1e9, post_s=args.post_us / 1e6)
    print("A round by the formulas, and the slice in KiB below which others are faster than direct; 0: nowhere")
    rows = bounds(net, args.ranks)
    print_rows(rows, COLUMNS, header=True)
    write_result(args, rows, network=asdict(net))


if __name__ == "__main__":
    main()
