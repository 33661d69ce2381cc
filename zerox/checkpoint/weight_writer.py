"""Writes a model's weights into safetensors files: each rank its parts, into files that rank 0 made.

What lies in a row in memory and in the file is written from where it lies. The rest, as a channels-last parameter or
one on a device, goes through a small chunk of memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.records import bytes_in
from zerox.checkpoint.safetensors_file import Entry, make_header
from zerox.checkpoint.weight_parts import Part
from zerox.plan.file_runs import runs, slabs
from zerox.plan.weight_split import name_files, split

CHUNK_BYTES = 2**20
CPU = torch.device("cpu")
METADATA = {"format": "pt"}  # transformers refuses files without it


class Whole(NamedTuple):
    """A weight as files have it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class PlannedFile(NamedTuple):
    """``header``: its first bytes. ``entries``: where each weight lies behind them."""

    name: str
    header: bytes
    entries: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        return max((each.stop for each in self.entries.values()), default=len(self.header))


def plan_files(weights: Sequence[Whole], most_bytes: int) -> list[PlannedFile]:
    """ValueError for a dtype that such files do not have."""
    by_name = {each.name: each for each in weights}
    groups = split({each.name: each.nbytes for each in weights}, most_bytes)
    found = []
    for file, names in zip(name_files(len(groups)), groups, strict=True):
        tensors = [(name, by_name[name].dtype, by_name[name].shape) for name in names]
        found.append(PlannedFile(file, *make_header(tensors, METADATA)))
    return found


def make_files(folder: Path, files: Sequence[PlannedFile]) -> None:
    """With their headers, and with room on the disk for all that will be in them. OSError with a file's name."""
    for file in files:
        with _opened(folder / file.name, os.O_CREAT | os.O_EXCL) as descriptor:
            os.posix_fallocate(descriptor, 0, file.nbytes)
            _write(descriptor, memoryview(file.header), 0)


def write_parts(folder: Path, files: Sequence[PlannedFile], parts: Mapping[str, Sequence[Part]]) -> None:
    """``parts``: this rank's, by the names of their weights. All are on the disk afterwards. OSError with a file's
    name; CheckpointError if this rank does not see the folder."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 made, is not there: all ranks must see one file system, and for a relative path "
            "have one working folder"
        )
    for file in files:
        own = [(entry, part) for name, entry in file.entries.items() for part in parts.get(name, ())]
        if own:
            with _opened(folder / file.name, 0) as descriptor:
                for entry, part in own:
                    _write_part(descriptor, entry, part)
                os.fsync(descriptor)


def sync_files(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Headers too are on the disk afterwards."""
    for file in files:
        with _opened(folder / file.name, 0) as descriptor:
            os.fsync(descriptor)


def _write_part(descriptor: int, entry: Entry, part: Part) -> None:
    values, most = part.values.detach(), CHUNK_BYTES // entry.dtype.itemsize
    if values.device == CPU and values.is_contiguous() and not (values.is_conj() or values.is_neg()):
        _write_rows(descriptor, entry, part.offsets, values)
        return
    chunk = torch.empty(min(most, values.numel()), dtype=entry.dtype, device=CPU)
    for offsets, sizes in slabs(part.sizes, most):
        inside = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        piece = chunk[: math.prod(sizes)].view(sizes).copy_(values[inside])
        _write_rows(descriptor, entry, [own + more for own, more in zip(part.offsets, offsets, strict=True)], piece)


def _write_rows(descriptor: int, entry: Entry, offsets: Sequence[int], values: Tensor) -> None:
    """Contiguous ``values`` of the CPU, which are the weight's from ``offsets`` on."""
    if not values.numel():
        return
    memory, itemsize = bytes_in(values), entry.dtype.itemsize
    done = 0
    for start, numel in runs(entry.shape, (tuple(offsets), tuple(values.shape))):
        _write(descriptor, memory[done : done + numel * itemsize], entry.start + start * itemsize)
        done += numel * itemsize


def _write(descriptor: int, data: memoryview, start: int) -> None:
    """The system may take less at once than it is given: of more than 2 GiB it does."""
    while data:
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open for writing. OSError has the file's name, which system calls on descriptors leave out."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
