"""What zerox.save() and zerox.load() need: memory above the running optimizer, and time beside the disk's own.

    python -m bench.checkpoint [--ranks 2] [--dtype bf16] [--folder FOLDER] [--json FILE] [--png FILE]

Memory is counted twice, on the rank where it is most: tensors that torch allocates, and what the process takes from the
system (the peak of its resident set above what it had). "bucket" is the largest one with all its state, of all ranks.
Saving is compared with ranks that write as many bytes and wait for the disk as it does, loading with ranks that read
the same files, in turn in each round; files have been read once, and are out of the system's cache before they are read
again. FOLDER must be on the disk that is meant. Loaded state is compared bit by bit before anything is timed.
"converted" loads into bfloat16 moments, and with --dtype bf16 into fp32 masters.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from bench.allocator import Allocator, build
from bench.facts import write_result
from bench.jobs import WrongResult
from bench.options import parse_step, training_parser
from bench.plots import save_bars
from bench.ranks import largest, on_ranks
from bench.systems import Training
from zerox import FusedShardedAdam, load, save

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


def check(ours: tuple[nn.Module, FusedShardedAdam], theirs: tuple[nn.Module, FusedShardedAdam]) -> None:
    """Raises WrongResult unless parameters and this rank's state are the same bits."""
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        pairs = [(p.detach(), q.detach())]
        pairs += [(tensor, theirs[1].state[q][key]) for key, tensor in ours[1].state.get(p, {}).items()]
        for a, b in pairs:
            if not torch.equal(a, b):
                raise WrongResult("what was loaded is not what was saved")


def files_of(folder: Path) -> list[Path]:
    """This rank's share of a checkpoint's files."""
    return sorted(folder.iterdir())[dist.get_rank() :: dist.get_world_size()]


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


def measure(training: Training, folder: Path, rounds: int, library: Path) -> list[Row]:
    """On each rank."""
    ours, theirs = built(training, 0), built(training, 1)
    other_form = {"state_dtype": torch.bfloat16} | ({"master_weights": "fp32"} if training.dtype == "bf16" else {})
    converted = built(training, 1, **other_form)
    costs, path = Costs(library), folder / "checkpoint"
    plain = folder / f"plain-{dist.get_rank()}"

    def load_converted() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that bfloat16 holds less
            load(path, *converted)

    save(path, *ours)
    load(path, *theirs)
    load_converted()
    check(ours, theirs)
    own = sum(file.stat().st_size for file in files_of(path))
    samples: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(rounds):
        for name, work, disk in (
            ("save", lambda: save(path, *ours), lambda: write_plainly(plain, own)),
            ("load", lambda: load(path, *theirs), lambda: read_plainly(files_of(path))),
            ("load, converted", load_converted, lambda: read_plainly(files_of(path))),
        ):
            if name == "load":  # a virtual disk may still be writing at its host, and be slow at the first reading
                read_plainly(files_of(path))
            forget(files_of(path))
            took = costs.of(work)
            forget(files_of(path))
            samples.setdefault(name, []).append((*took, costs.of(disk)[0]))
    bucket = max(
        bucket.buffer.flat.nbytes
        + dist.get_world_size() * sum(t.nbytes for t in (*bucket.moments, bucket.master) if t is not None)
        for bucket in ours[1]._buckets
    )
    total = torch.tensor(own)
    dist.all_reduce(total)
    rows = []
    for name, found in samples.items():
        seconds, tensors, process, disk = (statistics.median(each) for each in zip(*found, strict=True))
        rows.append(
            {
                "what": name,
                "ranks": dist.get_world_size(),
                "dtype": training.dtype,
                "bytes": int(total),
                "seconds": seconds,
                "disk_seconds": disk,
                "ratio": seconds / disk,
                "tensor_bytes": int(tensors),
                "process_bytes": int(process),
                "bucket_bytes": int(bucket),
            }
        )
    return rows


HEADER = f"{'ranks':>5}  {'what':<16}{'MiB':>8}{'ms':>9}{'disk ms':>9}{'ratio':>7}   above the optimizer, MiB: "
HEADER += f"{'tensors':>8}{'process':>9}{'bucket':>8}"


def line(row: Row) -> str:
    times = f"{row['seconds'] * 1e3:>9,.0f}{row['disk_seconds'] * 1e3:>9,.0f}{row['ratio']:>7.2f}"
    tensors, process, bucket = (row[f"{name}_bytes"] / MIB for name in ("tensor", "process", "bucket"))
    size = f"{row['bytes'] / MIB:>8,.0f}"
    return f"{row['ranks']:>5}  {row['what']:<16}{size}{times}{'':>29}{tensors:>8,.1f}{process:>9,.1f}{bucket:>8,.1f}"


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
        numbers = [("bucket", "the largest bucket with its state", rows[0]["bucket_bytes"] / MIB)]
        numbers += [(row["what"], kind, row[f"{kind}_bytes"] / MIB) for row in rows for kind in ("tensor", "process")]
        save_bars(numbers, f"memory above the optimizer, {args.ranks} ranks, MiB", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
