"""What a plan costs, and what it looks like: buckets, slices and messages of known models over many ranks."""

from __future__ import annotations

import resource
import time
import tracemalloc
from typing import Any

import torch

from bench.shapes import MODELS, Model
from bench.traffic import DIRECT, NATIVE, Itemsizes, sent_in_step
from zerox import estimate
from zerox.options import Options
from zerox.plan.buckets import BucketPlan

Row = dict[str, Any]
DTYPE = torch.bfloat16
REPEATS = 3
MIB = 2**20


def plan_of(model: Model, world_size: int, backend: str, options: Options) -> list[BucketPlan]:
    """With all that a rank asks of it before it allocates."""
    named = model.named_parameters(DTYPE)
    plans = options.plan([name for name, _ in named], [param for _, param in named], backend, world_size)
    for plan in plans:
        assert plan.layout.trailer_numel >= 0
        plan.layout.segments(world_size - 1)
    return plans


def row_of(name: str, world_size: int, backend: str, options: Options | None = None) -> Row:
    model, options = MODELS[name](), options or Options()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plans = plan_of(model, world_size, backend, options)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    memory = estimate(model.named_parameters(DTYPE), world_size, backend=backend, local_world_size=1)
    estimate_s = time.perf_counter() - start
    tracemalloc.start()
    plan_of(model, world_size, backend, options)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    layouts = [plan.layout for plan in plans]
    sizes = Itemsizes(DTYPE.itemsize, DTYPE.itemsize)
    direct = DIRECT if backend == "gloo" else NATIVE  # an all-to-all sends what a ring does
    sent = {
        exchange: sent_in_step(plans, world_size - 1, options.placements, counted, sizes)
        for exchange, counted in ((DIRECT, direct), (NATIVE, NATIVE))
    }
    return {
        "part": "plan",
        "model": name,
        "numel": model.numel,
        "params": len(model.shapes),
        "ranks": world_size,
        "backend": backend,
        "plan_s": sorted(seconds)[REPEATS // 2],
        "plan_peak_bytes": peak_bytes,
        "estimate_s": estimate_s,
        "buckets": len(plans),
        "bucket_bytes": max(layout.numel for layout in layouts) * DTYPE.itemsize,
        "slice_bytes": max(layout.shard_numel for layout in layouts) * DTYPE.itemsize,
        "padding": sum(layout.padding for layout in layouts) / model.numel,
        "exchange_bytes": memory.exchange,
        "direct_messages": sent[DIRECT].messages,
        "direct_bytes": sent[DIRECT].nbytes,
        "native_messages": sent[NATIVE].messages,
        "native_bytes": sent[NATIVE].nbytes,
    }


HEADER = (
    f"{'model':<11} {'ranks':>6}  {'plan ms':>8} {'peak MB':>8}  {'buckets':>7} {'MiB each':>9} {'slice KiB':>10} "
    f"{'padding':>8}  {'messages':>12} {'GB sent':>8} {'buffers GiB':>11}"
)


def line(row: Row) -> str:
    return (
        f"{row['model']:<11} {row['ranks']:>6,}  {row['plan_s'] * 1e3:>8.1f} {row['plan_peak_bytes'] / 1e6:>8.1f}  "
        f"{row['buckets']:>7} {row['bucket_bytes'] / MIB:>9,.0f} {row['slice_bytes'] / 1024:>10,.0f} "
        f"{row['padding']:>8.2%}  {row['direct_messages']:>12,} {row['direct_bytes'] / 1e9:>8.2f} "
        f"{row['exchange_bytes'] / 2**30:>11.1f}"
    )


def run(models: list[str], world_sizes: list[int], backend: str) -> list[Row]:
    print(f"Plans in {str(DTYPE).removeprefix('torch.')}, default bucket size of {backend}, stage 2, direct exchange:")
    print(HEADER)
    rows: list[Row] = []
    for name in models:
        for world_size in world_sizes:
            rows.append(row_of(name, world_size, backend))
            print(line(rows[-1]), flush=True)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"This process, torch and all, took {peak_bytes / 1e6:,.0f} MB at most.")
    return [*rows, {"part": "process", "peak_bytes": peak_bytes}]
