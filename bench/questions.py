"""What it costs an optimizer that other ranks ask it for its state, where they can't read its memory.

    python -m bench.questions [--ranks 2 8] [--models tiny gpt2] [--rounds 15] [--json FILE]

Each rank builds an optimizer, in turn with ZEROX_STATE_PULL=1 and 0, over ZEROX_EXCHANGE=messages, of 40 small
parameters or of those of a GPT-2 of 124 M: the time of the constructor (the slowest rank's), and the threads and
sockets that it leaves. The group for questions is one more of gloo's, so each rank opens a connection to each other
one, and reads that one's addresses in the store: with N ranks N (N - 1) answers of the store, whose number at 512 ranks
is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from bench.common import Row, for_world_sizes, new_parser, on_ranks, parse
from zerox import FusedShardedAdam

WAYS = {"asked": "1", "not asked": "0"}
LAYER = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768)]
MODELS: dict[str, list[tuple[int, ...]]] = {
    "tiny": [(64, 64)] * 40,
    "gpt2": [(50257, 768), (1024, 768), *([*LAYER, (768,)] * 12), (768,), (768,)],
}


def holdings() -> tuple[int, int]:
    """Threads and sockets of this process."""
    sockets = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed since
            sockets += os.readlink(each).startswith("socket:")
    return len(os.listdir("/proc/self/task")), sockets


def built_once(params: list[nn.Parameter]) -> tuple[float, int, int]:
    """The constructor's milliseconds, and threads and sockets, of this rank."""
    dist.barrier()
    threads, sockets = holdings()
    start = time.perf_counter()
    optimizer = FusedShardedAdam(params, lr=1e-3)
    took = time.perf_counter() - start
    now = holdings()
    dist.barrier()
    del optimizer
    return took * 1e3, now[0] - threads, now[1] - sockets


def measure(models: list[str], rounds: int) -> list[Row]:
    """On each rank."""
    return [row for model in models for row in measure_model(model, rounds)]


def measure_model(model: str, rounds: int) -> list[Row]:
    params = [nn.Parameter(torch.ones(shape)) for shape in MODELS[model]]
    samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, value in WAYS.items():
            with patch.dict(os.environ, {"ZEROX_EXCHANGE": "messages", "ZEROX_STATE_PULL": value}):
                took, threads, sockets = built_once(params)
            slowest = torch.tensor([took])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            samples[name].append((float(slowest), threads, sockets))
    size = dist.get_world_size()
    rows: list[Row] = []
    for name, each in samples.items():
        took, threads, sockets = (statistics.median(column) for column in zip(*each, strict=True))
        rows.append({"ranks": size, "model": model, "what": name, "ms": took, "threads": threads, "sockets": sockets})
    asked, not_asked = (row["ms"] for row in rows)
    for row in rows:
        row["ratio"] = asked / not_asked
    return rows


COLUMNS = {"ranks": "", "model": "<6", "what": "<10", "ms": ".1f", "threads": ".0f", "sockets": ".0f", "ratio": ".3f"}


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("bench.questions", __doc__, "ranks", "rounds", ranks=[2, 8], rounds=15)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    for_world_sizes(args, COLUMNS, lambda world_size: on_ranks(measure, world_size, args.models, args.rounds))
    ranks = 512
    print(f"{ranks} ranks: {ranks - 1} sockets a rank more, and {ranks * (ranks - 1):,} answers of the store")


if __name__ == "__main__":
    main()
