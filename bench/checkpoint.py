"""What zerox.save() and zerox.load() need: memory above the running optimizer, and time beside the disk's own.

    python -m bench.checkpoint [--ranks 2] [--dtype bf16] [--folder FOLDER] [--json FILE] [--png FILE]

Memory is counted twice, on the rank where it is most: tensors that torch allocates, and what the process takes from the
system (the peak of its resident set above what it had). "bucket" is the largest one with all its state, of all ranks.
Saving is compared with ranks that write as many bytes and wait for the disk as it does, loading with ranks that read
the same files, in turn in each round; files have been read once, and are out of the system's cache before they are read
again. FOLDER must be on the disk that is meant. Loaded state is compared bit by bit before anything is timed.
"converted" loads into bfloat16 moments, and with --dtype bf16 into fp32 masters. Beside it what a training with torch's
own optimizers does: rank 0 has torch.save() write everything, which ZeroRedundancyOptimizer sends it first, and each
rank has torch.load() read it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import ProcessRaisedException

from bench.allocator import Allocator, build
from bench.facts import write_result
from bench.jobs import WrongResult
from bench.options import parse_step, training_parser
from bench.plots import save_bars
from bench.ranks import largest, on_ranks
from bench.systems import DDP, Training, ZeroRedundancy
from zerox import FusedShardedAdam, load, save
from zerox.checkpoint.manifest import sync

Row = dict[str, Any]
MIB = 2**20
CHUNK = bytes(4 * MIB)


class Costs:
    """Of one call on this rank: seconds, bytes of tensors, bytes of the process, each the largest rank's."""

    def __init__(self, library: Path) -> None:
        self.allocator = Allocator(library)

    def of(self, function: Callable[[], object]) -> tuple[float, float, float]:
        before, resident = self.allocator.now, status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        dist.barrier()
        start = time.perf_counter()
        tensors = self.allocator.peak_of(function) - before
        seconds = time.perf_counter() - start
        took, held, grown = largest([seconds, float(tensors), float(status("VmHWM") - resident)])
        return took, held, grown


def status(name: str) -> int:
    """Bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def built(training: Training, seed: int, **options: Any) -> tuple[nn.Module, FusedShardedAdam]:
    """With one step made, so that state is not all zero."""
    model = training.model()
    generator = torch.Generator().manual_seed(seed)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-3 * (seed + 1), **options)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class RankZeroSaves:
    """A training of ``system``: rank 0 writes everything with torch.save(), each rank reads it with torch.load()."""

    def __init__(self, system: DDP) -> None:
        system.step(system.training.batches(0, dist.get_rank()))
        self.model, self.optimizer = system.module, system.optimizer

    def save(self, file: Path) -> None:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            sync(file)
        dist.barrier()

    def load(self, file: Path) -> None:
        found = torch.load(file, weights_only=True, map_location="cpu")
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])


def check(ours: tuple[nn.Module, FusedShardedAdam], theirs: tuple[nn.Module, FusedShardedAdam]) -> None:
    """Raises WrongResult unless parameters and this rank's state are the same bits."""
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        pairs = [(p.detach(), q.detach())]
        pairs += [(tensor, theirs[1].state[q][key]) for key, tensor in ours[1].state.get(p, {}).items()]
        for a, b in pairs:
            if not torch.equal(a, b):
                raise WrongResult("what was loaded is not what was saved")


@dataclass
class Job:
    """``path``: a checkpoint's folder, or a file."""

    name: str
    path: Path
    run: Callable[[], None]
    reads: bool

    def files(self) -> list[Path]:
        """This rank's share."""
        everything = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        return everything[dist.get_rank() :: dist.get_world_size()]

    def nbytes(self) -> int:
        """Of all ranks."""
        total = torch.tensor(sum(file.stat().st_size for file in self.files()))
        dist.all_reduce(total)
        return int(total)


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


def sample(job: Job, costs: Costs, plain: Path) -> tuple[float, ...]:
    """Seconds, bytes of tensors, bytes of the process, seconds of the disk; largest rank's. ``plain``: to write to."""
    if job.reads:  # a virtual disk may still be writing at its host what was just written, and is slow then
        read_plainly(job.files())
    forget(job.files())
    took = costs.of(job.run)
    forget(job.files())
    share = job.nbytes() // dist.get_world_size()
    disk = costs.of((lambda: read_plainly(job.files())) if job.reads else (lambda: write_plainly(plain, share)))
    return *took, disk[0]


def measure(training: Training, folder: Path, rounds: int, library: Path) -> list[Row]:
    """On each rank."""
    ours, theirs = built(training, 0), built(training, 1)
    other_form = {"state_dtype": torch.bfloat16} | ({"master_weights": "fp32"} if training.dtype == "bf16" else {})
    converted = built(training, 1, **other_form)
    costs, path = Costs(library), folder / "checkpoint"

    def load_converted() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that bfloat16 holds less
            load(path, *converted)

    save(path, *ours)
    load(path, *theirs)
    load_converted()
    check(ours, theirs)
    jobs = [
        Job("zerox: save", path, lambda: save(path, *ours), reads=False),
        Job("zerox: load", path, lambda: load(path, *theirs), reads=True),
        Job("zerox: load, converted", path, load_converted, reads=True),
    ]
    for name, system in {"AdamW": DDP, "ZeRO": ZeroRedundancy}.items():
        peer = RankZeroSaves(system(training))
        peer.save(file := folder / f"{name}.pt")
        jobs.append(Job(f"{name}: save", file, partial(peer.save, file), reads=False))
        jobs.append(Job(f"{name}: load", file, partial(peer.load, file), reads=True))
    samples: list[list[tuple[float, ...]]] = [[] for _ in jobs]
    for _ in range(rounds):
        for job, found in zip(jobs, samples, strict=True):
            found.append(sample(job, costs, folder / f"plain-{dist.get_rank()}"))
    bucket = max(
        bucket.buffer.flat.nbytes + dist.get_world_size() * sum(stored.nbytes for stored in bucket.state.values())
        for bucket in ours[1].inside.buckets
    )
    rows = []
    for job, found in zip(jobs, samples, strict=True):
        seconds, tensors, process, disk = (statistics.median(each) for each in zip(*found, strict=True))
        rows.append(
            {
                "what": job.name,
                "ranks": dist.get_world_size(),
                "dtype": training.dtype,
                "bytes": job.nbytes(),
                "seconds": seconds,
                "disk_seconds": disk,
                "ratio": seconds / disk,
                "tensor_bytes": int(tensors),
                "process_bytes": int(process),
                "bucket_bytes": int(bucket),
            }
        )
    return rows


HEADER = f"{'ranks':>5}  {'what':<24}{'MiB':>8}{'ms':>9}{'disk ms':>9}{'ratio':>7}   above the optimizer, MiB: "
HEADER += f"{'tensors':>8}{'process':>9}{'bucket':>8}"


def line(row: Row) -> str:
    times = f"{row['seconds'] * 1e3:>9,.0f}{row['disk_seconds'] * 1e3:>9,.0f}{row['ratio']:>7.2f}"
    tensors, process, bucket = (row[f"{name}_bytes"] / MIB for name in ("tensor", "process", "bucket"))
    size = f"{row['bytes'] / MIB:>8,.0f}"
    return f"{row['ranks']:>5}  {row['what']:<24}{size}{times}{'':>29}{tensors:>8,.1f}{process:>9,.1f}{bucket:>8,.1f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_parser("bench.checkpoint", __doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="to save in (default: the current one)", default=Path())
    return parse_step(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    training = Training(layers=args.layers, context=8, batch=1, dtype=args.dtype)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    try:
        rows = on_ranks(measure, args.ranks, training, folder, args.rounds, build())
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
    print(HEADER, *map(line, rows), sep="\n")
    if args.json:
        write_result(args.json, "bench.checkpoint", argv, rows)
    if args.png:
        memory, time_taken = "memory above the optimizer, MiB: the larger of the two counts", "milliseconds"
        numbers = [(memory, row["what"], max(row["tensor_bytes"], row["process_bytes"]) / MIB) for row in rows]
        numbers.append((memory, "(largest bucket with its state)", rows[0]["bucket_bytes"] / MIB))
        numbers += [(time_taken, row["what"], row["seconds"] * 1e3) for row in rows]
        save_bars(numbers, f"saving and loading {rows[0]['bytes'] / MIB:,.0f} MiB on {args.ranks} ranks", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
