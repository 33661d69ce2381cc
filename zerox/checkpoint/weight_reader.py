"""Reads the rectangles of weights that are this rank's from files into their place, each byte once.

First all files are opened, and looked at: what does not fit is known before anything changes. Then run() reads. Where
the file's elements are as the memory's, they are read straight into it; else in pieces, which are converted.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zerox.checkpoint.manifest import CheckpointError, open_regular
from zerox.checkpoint.records import Record, bytes_in
from zerox.checkpoint.weight_files import Chunk, Kind, Seen, Stored, WeightFiles, find_weights, inside, tensors_in
from zerox.checkpoint.weight_parts import Part
from zerox.plan.file_runs import Place, overlap, row_major, runs, slabs

PIECE_BYTES = 2**20


class Read(NamedTuple):
    """The elements at ``place`` of a tensor of ``shape`` and ``dtype``, which begins at byte ``start`` of ``file``, and
    is row-major unless it has ``strides``, into ``target``. ``crc``: the CRC-32 of these elements, 0 if not known."""

    file: io.FileIO
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place
    target: Tensor
    strides: tuple[int, ...] = ()
    crc: int = 0

    def row_major(self) -> Iterator[Read]:
        """The same as of tensors that are."""
        if not self.strides:
            yield self
            return
        for piece in row_major(self.shape, self.strides, self.place):
            at = tuple(piece.at.get(dim, slice(None)) for dim in range(len(self.shape)))
            left = [dim for dim in range(len(self.shape)) if dim not in piece.at]
            target = self.target[at].permute([left.index(dim) for dim in piece.dims])
            start = self.start + piece.first * self.dtype.itemsize
            yield Read(self.file, start, self.dtype, piece.shape, piece.place, target)


class WeightReader:
    """``nbytes``: how many bytes of elements it has read so far."""

    def __init__(self, weights: WeightFiles) -> None:
        self.weights = weights
        self.nbytes = 0
        self.reads: list[Read] = []
        self._open: dict[str, io.FileIO] = {}
        self._here: WeightFiles | None = None  # a checkpoint as it is on this machine, once it was looked through
        self._stack = ExitStack()

    def plan(self, name: str, stored: Stored, parts: Sequence[Part]) -> None:
        """These of a tensor in the files. CheckpointError if a file here is not as rank 0 saw it."""
        for part in parts:
            for chunk in stored.chunks:
                place = overlap((part.offsets, part.sizes), (chunk.offsets, chunk.sizes))
                if place is not None:
                    self._plan(name, stored, chunk, place, part)

    def _plan(self, name: str, stored: Stored, chunk: Chunk, place: Place, part: Part) -> None:
        target = part.values[_slices(_less(place, part.offsets))]
        file, start, crc = self._file(chunk.file), chunk.start, 0
        inside_chunk = _less(place, chunk.offsets)
        if chunk.record:
            nbytes = torch.Size(chunk.sizes).numel() * stored.dtype.itemsize
            try:
                record = Record(file, chunk.start, chunk.record)
                member = record.member(nbytes)
                start += record.start_of(member)
            except ValueError as error:
                raise CheckpointError(f"{os.fsdecode(file.name)} does not have {name}: {error}") from None
            crc = member.CRC if inside_chunk[1] == chunk.sizes else 0  # of what is read in parts nobody knows it
        self.reads.append(Read(file, start, stored.dtype, chunk.sizes, inside_chunk, target, chunk.strides, crc))

    def _file(self, name: str) -> io.FileIO:
        if name not in self._open:
            path, seen = self._path(name), self.weights.files[name]
            file = self._open[name] = self._stack.enter_context(open_regular(path))
            if Seen.of(file).nbytes != seen.nbytes:
                raise CheckpointError(f"{path} has {Seen.of(file).nbytes} bytes here, and {seen.nbytes} on rank 0")
            if Seen.of(file) != seen:
                self._compare(name, file)
        return self._open[name]

    def _path(self, name: str) -> Path:
        """On another machine a file of this name may be a link, and not one that rank 0 has looked at."""
        is_ours = self.weights.kind is Kind.CHECKPOINT  # which lists only names of zerox's, as zerox.load() reads them
        return self.weights.folder / name if is_ours else inside(self.weights.folder, name)

    def _compare(self, name: str, file: io.FileIO) -> None:
        """Of a file that is not the very one that rank 0 saw, as on another machine: CheckpointError if it has other
        tensors."""
        known = self.weights.tensors
        if self.weights.kind is Kind.CHECKPOINT:
            self._here = self._here or find_weights(self.weights.folder)
            is_same = self._here.tensors == known
        else:
            of_file = {each: stored for each, stored in known.items() if stored.chunks[0].file == name}
            is_same = tensors_in(self.weights.kind, file, name)[0] == of_file
        if not is_same:
            raise CheckpointError(f"{self.weights.folder / name} has other tensors here than on rank 0")

    def run(self) -> None:
        """Raises OSError, and CheckpointError for a file that ends early: then part of it has been read."""
        for read in sorted(self.reads, key=lambda each: (str(each.file.name), each.start)):
            for each in read.row_major():
                self._run(each)

    def _run(self, read: Read) -> None:
        target, (offsets, sizes), crc = read.target, read.place, 0
        if target.device.type == "cpu" and target.dtype is read.dtype and target.is_contiguous():
            self._fill(target, read, read.place)
            crc = zlib.crc32(bytes_in(target)) if read.crc else 0
        else:
            piece = torch.empty(max(1, PIECE_BYTES // read.dtype.itemsize), dtype=read.dtype, device="cpu")
            for start, some in slabs(sizes, piece.numel()):
                found = piece[: torch.Size(some).numel()].view(some)
                self._fill(found, read, (tuple(map(sum, zip(offsets, start, strict=True))), some))
                target[_slices((start, some))].copy_(found)
                crc = zlib.crc32(bytes_in(found), crc) if read.crc else 0
        if crc != read.crc:
            end = read.start + torch.Size(sizes).numel() * read.dtype.itemsize
            raise CheckpointError(
                f"{os.fsdecode(read.file.name)} was changed after it was written, between bytes {read.start} and {end}"
            )

    def _fill(self, memory: Tensor, read: Read, place: Place) -> None:
        """``memory``: contiguous, of the host, and of the file's dtype."""
        view = bytes_in(memory)
        size, at = read.dtype.itemsize, 0
        for first, numel in runs(read.shape, place):
            self._read(read.file, view[at : at + numel * size], read.start + first * size)
            at += numel * size

    def _read(self, file: io.FileIO, view: memoryview, start: int) -> None:
        while view:
            count = os.preadv(file.fileno(), [view], start)
            if not count:
                raise CheckpointError(f"{os.fsdecode(file.name)} ends at byte {start}, and ended later a moment ago")
            self.nbytes += count
            view, start = view[count:], start + count

    def close(self) -> None:
        self.reads = []
        self._stack.close()


def _less(place: Place, offsets: Sequence[int]) -> Place:
    """Counted from ``offsets`` on."""
    return tuple(at - first for at, first in zip(place[0], offsets, strict=True)), place[1]


def _slices(place: Place) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*place, strict=True))
