"""What `if rank == 0: torch.save(optimizer.state_dict(), path)` costs beside torch.save of a state that is whole.

    python -m bench.rank_0_save [--ranks 4] [--mib 1024] [--folder FOLDER] [--json FILE]

Rank 0 saves; the others wait meanwhile. In turn in each round: what it saves of its own accord; torch.save of the whole
state, which full_state_dict() has gathered before; and a plain read of what the other ranks have of it, from their
memory into memory of rank 0's. "over" is what the first takes longer than the second, in parts of the third. Both files
are the same, which is checked first.

What a save reads lies in memory that the process did not have before. The plain read is into what the allocator gives,
which it may have kept from the round before; and, as "over_new", into pages that are new, as the save's.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.common import Row, for_world_sizes, new_parser, on_ranks, parse
from bench.jobs import WrongResult
from zerox import _C as C
from zerox import FusedShardedAdam

MIB = 2**20
PARAM_MIB = 16


def built(mib: int) -> FusedShardedAdam:
    """Of float32 parameters, with one step made, so that state is not all zero."""
    params = [nn.Parameter(torch.ones(PARAM_MIB * MIB // 4)) for _ in range(mib // PARAM_MIB)]
    optimizer = FusedShardedAdam(params, lr=1e-3)
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 1.0 + index)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def tensors_of(optimizer: FusedShardedAdam) -> list[Tensor]:
    return [stored.values for bucket in optimizer.inside.buckets for stored in bucket.state.values()]


def new_pages(numel: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, 4 * numel), dtype=torch.float32)


def read_plainly(others: list[tuple[int, list[tuple[int, int]]]], make: Callable[[int], Tensor]) -> None:
    """``others``: each one's process, and address and number of elements of each of its tensors."""
    kept = []
    for process, tensors in others:
        for address, numel in tensors:
            kept.append(make(numel))
            if not C.read_memory(process, address, kept[-1]):
                raise WrongResult("another rank's memory could not be read")


def seconds(job: Callable[[], object], path: Path) -> float:
    """Of rank 0. The last file is gone before, so that each is a new one."""
    path.unlink(missing_ok=True)
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == 0:
        job()
    took = time.perf_counter() - start
    dist.barrier()
    return took


def measure(mib: int, path: Path, rounds: int) -> list[Row]:
    """On each rank."""
    optimizer = built(mib)
    told: list[tuple[int, list[tuple[int, int]]]] = [(0, [])] * dist.get_world_size()
    own = os.getpid(), [(each.data_ptr(), each.numel()) for each in tensors_of(optimizer)]
    dist.all_gather_object(told, own)
    whole = optimizer.full_state_dict()
    jobs: dict[str, Callable[[], object]] = {
        "state_dict()": lambda: torch.save(optimizer.state_dict(), path),
        "whole already": lambda: torch.save(whole, path),
        "plain read": partial(read_plainly, told[1:], torch.empty),
        "into new pages": partial(read_plainly, told[1:], new_pages),
    }
    if dist.get_rank() == 0:
        jobs["state_dict()"]()
        found = torch.load(path, weights_only=True)["state"]
        for number, state in whole["state"].items():
            if not all(torch.equal(value, found[number][key]) for key, value in state.items()):
                raise WrongResult("what rank 0 saved is not the whole state")
        del found
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            samples[name].append(seconds(job, path))
    medians = {name: statistics.median(each) for name, each in samples.items()}
    longer = medians["state_dict()"] - medians["whole already"]
    over, over_new = longer / medians["plain read"], longer / medians["into new pages"]
    missing = sum(numel * 4 for _, tensors in told[1:] for _, numel in tensors) / MIB
    row = {"ranks": dist.get_world_size(), "mib": mib, "missing_mib": missing, "over": over, "over_new": over_new}
    return [{**row, "what": name, "seconds": median} for name, median in medians.items()]


COLUMNS = {
    "ranks": "",
    "what": "<15",
    "mib": ",.0f",
    "missing_mib": ",.0f",
    "seconds": ".3f",
    "over": ".2f",
    "over_new": ".2f",
}
FOLDER = {"type": Path, "default": Path(), "help": "to save in"}
SIZE = {"type": int, "default": 1024, "help": "of the parameters, in MiB"}
make_parser = partial(new_parser, "bench.rank_0_save", __doc__, "ranks", "rounds", rounds=5, folder=FOLDER, mib=SIZE)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    path = args.folder / "rank-0-saves.pt"
    try:
        for_world_sizes(args, COLUMNS, lambda world_size: on_ranks(measure, world_size, args.mib, path, args.rounds))
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
