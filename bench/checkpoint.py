"""What zerox.save() and zerox.load() need: memory above the running optimizer, and time beside the disk's own.

    python -m bench.checkpoint [--ranks 2] [--dtype bf16] [--folder FOLDER] [--json FILE]

Memory is that of tensors that torch allocates, on the rank where it is most. "bucket" is the largest one with all its
state, of all ranks.
Saving is compared with ranks that write as many bytes and wait for the disk as it does, loading with ranks that read
the same files, in turn in each round; files have been read once, and are out of the system's cache before they are read
again. FOLDER must be on the disk that is meant. Loaded state is compared bit by bit before anything is timed.
"converted" loads into bfloat16 moments, and with --dtype bf16 into fp32 masters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.allocator import Allocator, build
from bench.common import TRAINING, Row, for_world_sizes, largest, new_parser, on_ranks, parse, training_of
from bench.jobs import WrongResult
from bench.systems import Training
from zerox import FusedShardedAdam, load, save

MIB = 2**20
CHUNK = bytes(4 * MIB)
Trained = tuple[nn.Module, FusedShardedAdam]


def built(training: Training, seed: int, form: dict[str, torch.dtype | str] | None = None) -> Trained:
    """With one step made, so that state is not all zero."""
    model = training.model()
    generator = torch.Generator().manual_seed(seed)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-3 * (seed + 1), **(form or {}))  # type: ignore[arg-type]
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def check(ours: Trained, theirs: Trained) -> None:
    """Raises WrongResult unless parameters and this rank's state are the same bits."""
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        pairs = [(p.detach(), q.detach())]
        pairs += [(tensor, theirs[1].state[q][key]) for key, tensor in ours[1].state.get(p, {}).items()]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise WrongResult("what was loaded is not what was saved")


def write_plainly(file: Path, nbytes: int) -> None:
    with file.open("wb") as stream:
        for start in range(0, nbytes, len(CHUNK)):
            stream.write(CHUNK[: min(len(CHUNK), nbytes - start)])
        stream.flush()
        os.fsync(stream.fileno())


def read_plainly(files: list[Path]) -> None:
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(len(CHUNK)):
                pass


def forget(files: list[Path]) -> None:
    """Out of the system's cache."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def costs(function: Callable[[], object], allocator: Allocator) -> list[float]:
    """Seconds, and MiB of tensors above what there was, each the largest rank's."""
    before = allocator.now
    dist.barrier()
    start = time.perf_counter()
    tensor_mib = (allocator.peak_of(function) - before) / MIB
    return largest([time.perf_counter() - start, tensor_mib])


def sample(name: str, job: Callable[[], object], path: Path, plain: Path, allocator: Allocator) -> list[float]:
    """Its costs, and the seconds of the disk. ``plain``: a file to write as many bytes to."""

    def files() -> list[Path]:
        """This rank's share."""
        return sorted(path.iterdir())[dist.get_rank() :: dist.get_world_size()]

    if name != "save":  # a virtual disk may still be writing at its host what was just written, and is slow then
        read_plainly(files())
    forget(files())
    took = costs(job, allocator)
    forget(files())
    share = sum(file.stat().st_size for file in path.iterdir()) // dist.get_world_size()
    disk = partial(write_plainly, plain, share) if name == "save" else partial(read_plainly, files())
    return [*took, costs(disk, allocator)[0]]


def measure(training: Training, folder: Path, rounds: int, library: Path) -> list[Row]:
    """On each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, theirs = built(training, 0), built(training, 1)
    masters: dict[str, torch.dtype | str] = {"master_weights": "fp32"} if training.dtype == "bf16" else {}
    converted = built(training, 1, {"state_dtype": torch.bfloat16, **masters})
    warnings.filterwarnings("ignore", "zerox: rounded")  # bfloat16 holds less
    path, allocator = folder / "checkpoint", Allocator(library)
    jobs = {
        "save": partial(save, path, *ours),
        "load": partial(load, path, *theirs),
        "load, converted": partial(load, path, *converted),
    }
    for job in jobs.values():
        job()
    check(ours, theirs)
    samples: dict[str, list[list[float]]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            samples[name].append(sample(name, job, path, folder / f"plain-{rank}", allocator))
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    buckets = [
        bucket.buffer.flat.nbytes + world_size * sum(stored.nbytes for stored in bucket.state.values())
        for bucket in ours[1].inside.buckets
    ]
    rows = []
    for name, found in samples.items():
        seconds, tensor_mib, disk = (statistics.median(each) for each in zip(*found, strict=True))
        row = {"what": name, "ranks": world_size, "dtype": training.dtype, "mib": nbytes / MIB, "seconds": seconds}
        row |= {"disk_seconds": disk, "ratio": seconds / disk}
        rows.append({**row, "tensor_mib": tensor_mib, "bucket_mib": max(buckets) / MIB})
    return rows


COLUMNS = {"ranks": "", "what": "<15", "mib": ",.0f", "seconds": ".3f", "disk_seconds": ".3f", "ratio": ".2f"}
COLUMNS |= {"tensor_mib": ",.1f", "bucket_mib": ",.1f"}


def in_folders(
    args: argparse.Namespace, prefix: str, columns: dict[str, str], rows_in: Callable[[Path, int], list[Row]]
) -> None:
    """Rows of each number of ranks, in a new folder on the disk that is meant."""

    def rows_at(world_size: int) -> list[Row]:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=args.folder) as folder:
            return rows_in(Path(folder), world_size)

    for_world_sizes(args, columns, rows_at)


FOLDER = {"type": Path, "default": Path(), "help": "to save in"}
make_parser = partial(new_parser, "bench.checkpoint", __doc__, *TRAINING, "ranks", "rounds", rounds=5, folder=FOLDER)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training = training_of(args, context=8, batch=1)

    def rows_in(folder: Path, world_size: int) -> list[Row]:
        return on_ranks(measure, world_size, training, folder, args.rounds, build())

    in_folders(args, "checkpoint-", COLUMNS, rows_in)


if __name__ == "__main__":
    main()
