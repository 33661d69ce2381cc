"""The closed form of what a rank sends, held against the extension's own counters on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from bench.jobs import WrongResult
from bench.probes import exchange_chosen
from bench.ranks import on_ranks
from bench.systems import Training, Zerox, ZeroxStage1
from bench.traffic import EXCHANGES, Itemsizes, Sent, sent_in_step
from zerox.plan.stage import stage_of

Row = dict[str, Any]


def count(training: Training) -> list[Row]:
    """On each rank: a row for each stage and way to exchange. Raises WrongResult."""
    return list(_rows(training))


def _rows(training: Training) -> Iterator[Row]:
    for kind in (ZeroxStage1, Zerox):
        for exchange in EXCHANGES:
            with exchange_chosen(exchange):
                system = kind(training)
            manager = system.ours.inside.manager
            before = manager.traffic
            system.step(training.batches(0, dist.get_rank()))
            system.ours.synchronize()
            counted = Sent(*(after - earlier for after, earlier in zip(manager.traffic, before, strict=True)))
            buckets = system.ours.inside.buckets
            itemsize = buckets[0].buffer.flat.itemsize
            plans = [bucket.plan for bucket in buckets]
            expected = sent_in_step(
                plans, dist.get_rank(), stage_of(kind.stage), exchange, Itemsizes(itemsize, itemsize)
            )
            if counted != expected:
                raise WrongResult(f"{kind.name}, {exchange}: the extension counted {counted}, not {expected}")
            yield {
                "part": "traffic",
                "ranks": dist.get_world_size(),
                "stage": kind.stage,
                "exchange": exchange,
                "buckets": len(plans),
                "straight": sum(plan.num_straight for plan in plans),
                "messages": counted.messages,
                "bytes": counted.nbytes,
            }


def run(world_sizes: list[int], training: Training) -> list[Row]:
    print("Sent by rank 0 in a step, as counted and in closed form (the same):")
    print(f"{'ranks':>5} {'stage':>5}  {'exchange':<9} {'buckets':>7} {'messages':>9} {'MB':>9}")
    rows = []
    for world_size in world_sizes:
        for row in on_ranks(count, world_size, training):
            rows.append(row)
            print(
                f"{row['ranks']:>5} {row['stage']:>5}  {row['exchange']:<9} {row['buckets']:>7} {row['messages']:>9,} "
                f"{row['bytes'] / 1e6:>9.1f}",
                flush=True,
            )
    return rows
