"""What zerox.load_weights() needs: memory above the running optimizer, and time beside reading the same ranges.

    python -m bench.load_weights [--ranks 2] [--dtype bf16] [--folder FOLDER] [--json FILE]

Each rank reads, into memory that it has just asked for, the very ranges of the files that load_weights() makes it read:
"read_seconds". Both read the same files in turn in each round, out of the system's cache before. "read" is what all
ranks read together, of what there is in the files. Memory is that of tensors that torch allocates, on the rank where it
is most. FOLDER must be on the disk that is meant. What is loaded is compared bit by bit before anything is timed.
"converted" has files in the other one of float32 and bfloat16. What files have is random: with 8 layers a GPT of 41 M.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.allocator import Allocator, build
from bench.checkpoint import FOLDER, MIB, costs, forget, in_folders, read_plainly
from bench.common import TRAINING, Row, new_parser, on_ranks, parse, training_of
from bench.jobs import WrongResult
from bench.systems import Training
from zerox import FusedShardedAdam, load_weights
from zerox._C import SyncPoint
from zerox.checkpoint.safetensors_file import make_header
from zerox.checkpoint.weight_files import Stored, find_weights
from zerox.checkpoint.weight_parts import Part, weights_of
from zerox.checkpoint.weight_reader import WeightReader

OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}


def value_of(name: str, param: Tensor, dtype: torch.dtype) -> Tensor:
    """In the file: the same on all ranks. Each by itself, so that no rank has all of them."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(param.shape, generator=generator).to(dtype)


def write(file: Path, model: nn.Module, dtype: torch.dtype) -> None:
    params = dict(model.named_parameters())
    header, entries = make_header([(name, dtype, param.shape) for name, param in params.items()])
    with file.open("wb") as stream:
        stream.write(header)
        for name in entries:
            value = value_of(name, params[name], dtype)
            stream.write(value.view(-1).view(torch.uint8).numpy().data)


def check(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises WrongResult unless the model has these, converted."""
    for name, param in model.named_parameters():
        if not torch.equal(param.detach(), value_of(name, param, dtype).to(param.dtype)):
            raise WrongResult(f"{name} is not what the file has")


def own_parts(optimizer: FusedShardedAdam, model: nn.Module, stored: dict[str, Stored]) -> list[tuple[str, Part]]:
    """This rank's, of tensors that the file has. Collective."""
    optimizer.inside.sync(SyncPoint.SAVE)
    named = [(next(n for n in weight.names if n in stored), weight) for weight in weights_of(optimizer, model)]
    return [(name, part) for name, weight in named for part in weight.parts]


def read_ranges(path: Path, parts: list[tuple[str, Part]]) -> int:
    """Each into fresh memory of the file's dtype. Returns how many bytes."""
    weights = find_weights(path)
    reader = WeightReader(weights)
    for name, part in parts:
        fresh = torch.empty(part.sizes, dtype=weights.tensors[name].dtype)
        reader.plan(name, weights.tensors[name], [part._replace(values=fresh)])
    reader.run()
    reader.close()
    return reader.nbytes


def sample(job: Callable[[], object], plain: Callable[[], object], file: Path, allocator: Allocator) -> list[float]:
    found = []
    for each in (job, plain):
        read_plainly([file])  # a virtual disk may still be writing what was just written, and is slow then
        dist.barrier()
        forget([file])
        found += costs(each, allocator)
    return [found[0], found[1], found[2]]


def measure(training: Training, folder: Path, rounds: int, library: Path) -> list[Row]:
    """On each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    allocator = Allocator(library)
    own = next(training.model().parameters()).dtype
    rows = []
    for stage in (2, 3):
        for what, dtype in (("load", own), ("load, converted", OTHER[own])):
            model = training.model()
            optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
            file = folder / f"{stage} {dtype}.safetensors"
            if rank == 0:
                write(file, model, dtype)
            dist.barrier()
            load_weights(optimizer, file)
            check(model, dtype)
            parts = own_parts(optimizer, model, find_weights(file).tensors)
            read = torch.tensor([read_ranges(file, parts)])
            dist.all_reduce(read)
            jobs = partial(load_weights, optimizer, file), partial(read_ranges, file, parts)
            samples = [sample(*jobs, file, allocator) for _ in range(rounds)]
            seconds, tensor_mib, plain = (statistics.median(each) for each in zip(*samples, strict=True))
            nbytes = file.stat().st_size
            row = {"what": what, "ranks": world_size, "stage": stage, "dtype": training.dtype, "mib": nbytes / MIB}
            row |= {"seconds": seconds, "read_seconds": plain, "ratio": seconds / plain, "tensor_mib": tensor_mib}
            rows.append({**row, "read": int(read) / nbytes})
            del model, optimizer, parts, jobs  # before the next ones are made
    return rows


COLUMNS = {"ranks": "", "stage": "", "what": "<15", "mib": ",.0f", "seconds": ".3f", "read_seconds": ".3f"}
COLUMNS |= {"ratio": ".2f", "read": ".3f", "tensor_mib": ",.1f"}

make_parser = partial(new_parser, "bench.load_weights", __doc__, *TRAINING, "ranks", "rounds", rounds=5, folder=FOLDER)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training = training_of(args, context=8, batch=1)

    def rows_in(folder: Path, world_size: int) -> list[Row]:
        return on_ranks(measure, world_size, training, folder, args.rounds, build())

    in_folders(args, "weights-", COLUMNS, rows_in)


if __name__ == "__main__":
    main()
