"""Direct and native exchange beside each other over gloo, from tiny slices to large ones, on ranks of one machine.

Messages, even where ranks could read each other's memory: what two machines would do. Both are checked against the
mean before they are timed. A round is a bucket's reduce-scatter and all-gather; a sample is the slowest rank's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.jobs import WrongResult
from bench.ranks import largest, on_ranks
from bench.step_model import Line
from zerox import ops
from zerox.ops import EXACT_WORDS

Row = dict[str, Any]
KIB, MIB = 2**10, 2**20
SLICE_BYTES = tuple(KIB * 4**power for power in range(7))  # to 4 MiB
# torch 2.13 renamed both.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_TAG, GATHER_TAG = 1, 2
SAMPLES = 15


class Buffers:
    """One bucket of fp32 on one rank: a slice for each."""

    def __init__(self, slice_bytes: int) -> None:
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        numel = slice_bytes // 4
        self.flat = torch.zeros(self.world_size, numel)
        self.received = torch.zeros(self.world_size, numel)
        self.shard = torch.zeros(numel)
        self.segments = torch.tensor([[0, numel, 0, 0, 0]])
        self.replaced = torch.zeros(1, dtype=torch.uint8)

    def fill(self) -> None:
        self.flat[:] = torch.arange(self.world_size).view(-1, 1) + 10.0 * self.rank

    def is_right(self) -> bool:
        """After a whole round everybody has everybody's mean."""
        mean = 10.0 * statistics.mean(range(self.world_size))
        return torch.equal(self.flat, (torch.arange(self.world_size) + mean).view(-1, 1).expand_as(self.flat))


class DirectRound:
    """As csrc/exchange/direct_exchange.cpp: all receives first, then sends, each rank to its right neighbour."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.group: Any = dist.group.WORLD
        self.post_s: list[float] = []  # each: of posting one message, sent or received

    def __call__(self) -> None:
        b = self.buffers
        self._exchange(list(b.received), list(b.flat), SCATTER_TAG)
        slices = [b.flat[rank] if rank == b.rank else b.received[rank] for rank in range(b.world_size)]
        words = torch.zeros(EXACT_WORDS, dtype=torch.int64)
        ops.reduce_(b.shard, words, slices, b.segments, b.replaced, b.world_size, False)
        b.flat[b.rank] = b.shard
        self._exchange(list(b.flat), [b.flat[b.rank]] * b.world_size, GATHER_TAG)

    def _exchange(self, received: list[Tensor], sent: list[Tensor], tag: int) -> None:
        rank, world_size = self.buffers.rank, self.buffers.world_size
        start = time.perf_counter()
        senders = [(rank - step) % world_size for step in range(1, world_size)]
        owners = [(rank + step) % world_size for step in range(1, world_size)]
        works = [self.group.recv([received[peer]], peer, tag) for peer in senders]
        works += [self.group.send([sent[peer]], peer, tag) for peer in owners]
        self.post_s.append((time.perf_counter() - start) / len(works))
        for work in works:
            work.wait()


class NativeRound:
    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def __call__(self) -> None:
        b = self.buffers
        REDUCE_SCATTER(b.shard, b.flat.view(-1))
        b.shard.div_(b.world_size)
        ALL_GATHER(b.flat.view(-1), b.shard)


def check(name: str, call: Callable[[], None], buffers: Buffers) -> None:
    buffers.fill()
    call()
    if not buffers.is_right():
        raise WrongResult(f"{name} exchange of slices of {buffers.shard.nbytes} bytes is not the mean")


def measure(slice_bytes: tuple[int, ...], samples: int) -> list[Row]:
    """On each rank."""
    rows = []
    for nbytes in slice_bytes:
        buffers = Buffers(nbytes)
        direct, native = DirectRound(buffers), NativeRound(buffers)
        calls: dict[str, Callable[[], None]] = {"direct": direct, "native": native}
        for name, call in calls.items():
            check(name, call, buffers)
        repeats = max(1, min(20, MIB // nbytes))
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        cpu: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(samples):
            for name, call in calls.items():
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                for _ in range(repeats):
                    call()
                seconds[name].append((time.perf_counter() - start) / repeats)
                cpu[name].append((time.process_time() - start_cpu) / repeats)
        row: Row = {"part": "wire", "ranks": dist.get_world_size(), "slice_bytes": nbytes}
        slowest = {name: largest(each) for name, each in seconds.items()}
        for name in calls:
            row[f"{name}_us"] = statistics.median(slowest[name]) * 1e6
            row[f"{name}_cpu_us"] = statistics.median(largest(cpu[name])) * 1e6
        ratios = [b / a for a, b in zip(slowest["direct"], slowest["native"], strict=True)]
        row["native_over_direct"] = statistics.median(ratios)
        row["post_us"] = statistics.median(largest(direct.post_s)) * 1e6
        rows.append(row)
    return rows


def bound_of(rows: list[Row]) -> int | None:
    """The largest slice at which native is faster, of one number of ranks; None where it never is."""
    return max((row["slice_bytes"] for row in rows if row["native_over_direct"] < 1.0), default=None)


def line_of(rows: list[Row], exchange: str) -> Line:
    """Seconds of a round over the slice's bytes."""
    return Line.through((row["slice_bytes"], row[f"{exchange}_us"] / 1e6) for row in rows)


HEADER = (
    f"{'ranks':>5} {'slice KiB':>10}  {'direct us':>10} {'native us':>10} {'native/direct':>14}  "
    f"{'CPU direct':>11} {'native':>9}  {'post us':>8}"
)


def line(row: Row) -> str:
    return (
        f"{row['ranks']:>5} {row['slice_bytes'] / KIB:>10,.0f}  {row['direct_us']:>10,.0f} {row['native_us']:>10,.0f} "
        f"{row['native_over_direct']:>13.2f}x  {row['direct_cpu_us']:>11,.0f} {row['native_cpu_us']:>9,.0f}  "
        f"{row['post_us']:>8.1f}"
    )


def run(world_sizes: list[int], samples: int = SAMPLES) -> list[Row]:
    print("A bucket's reduce-scatter and all-gather over gloo, messages on loopback; results agree:")
    print(HEADER)
    rows: list[Row] = []
    for world_size in world_sizes:
        found: list[Row] = on_ranks(measure, world_size, SLICE_BYTES, samples)
        print("\n".join(line(row) for row in found))
        bound = bound_of(found)
        said = "direct is faster at every size" if bound is None else f"native is faster up to {bound / KIB:,.0f} KiB"
        print(f"{world_size} ranks: {said}", flush=True)
        rows += found
    return rows
