"""Regions of saved tensors, read zero-copy from the file."""

from __future__ import annotations

import math
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerox.checkpoint.records import Record

TENSORS = {
    "matrix": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "cube": torch.arange(3 * 4 * 5, dtype=torch.int64).view(3, 4, 5),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "bf16": torch.arange(30, dtype=torch.bfloat16).view(2, 15),
    "scalar": torch.tensor(-3, dtype=torch.int64),
    "one": torch.full((1, 1, 1), 2.5, dtype=torch.complex64),
}


def saved(tensor: Tensor, file: Path) -> tuple[int, int]:
    """Between others, and not at a multiple of anything: start and length."""
    with file.open("wb") as stream:
        stream.write(b"PK\3\4not mine")
        start = stream.tell()
        torch.save(tensor, stream)
        length = stream.tell() - start
        torch.save(torch.full((99,), 7.0), stream)
    return start, length


def regions(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All (offsets, sizes)."""
    ranges = [[(start, stop - start) for start in range(size) for stop in range(start, size + 1)] for size in shape]
    return [(tuple(o for o, _ in each), tuple(s for _, s in each)) for each in product(*ranges)]


def narrowed(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_every_region_is_what_torch_has_there(name: str, transposed: bool, tmp_path: Path) -> None:
    tensor = TENSORS[name]
    start, length = saved(tensor, tmp_path / "file")
    with (tmp_path / "file").open("rb", buffering=0) as file:
        for offsets, sizes in regions(tuple(tensor.shape)):
            target = torch.full(sizes[::-1] if transposed else sizes, 99, dtype=tensor.dtype)
            target = target.permute(tuple(reversed(range(len(sizes))))) if transposed else target
            Record(file, start, length).read_region(target, tensor.shape, offsets)
            assert torch.equal(target, narrowed(tensor, offsets, sizes)), (offsets, sizes)


def test_a_system_that_reads_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TENSORS["matrix"]
    start, length = saved(tensor, tmp_path / "file")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:97]], at))
    target = torch.zeros_like(tensor)
    with (tmp_path / "file").open("rb", buffering=0) as file:
        Record(file, start, length).read_region(target, tensor.shape, (0, 0))
    assert torch.equal(target, tensor)


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(2**20, dtype=torch.float32).view(1024, 1024)
    start, length = saved(tensor, tmp_path / "file")
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read.append(n := preadv(fd, buffers, at)) or n)
    target = torch.zeros(3, 1024)
    with (tmp_path / "file").open("rb", buffering=0) as file:
        Record(file, start, length).read_region(target, tensor.shape, (500, 0))
    assert torch.equal(target, tensor[500:503])
    assert target.nbytes <= sum(read) < target.nbytes + 4096, "the archive's directory, and these rows"


@pytest.mark.parametrize(
    ("shape", "moved", "message"),
    [
        ((7, 6), 0, "no tensor of 168 bytes"),
        ((7, 5), 3, "no tensor of 140 bytes"),
        ((5, 7), -12, "no tensor of 140 bytes"),
    ],
)
def test_something_else_is_told(shape: tuple[int, ...], moved: int, message: str, tmp_path: Path) -> None:
    start, length = saved(TENSORS["matrix"], tmp_path / "file")
    with (tmp_path / "file").open("rb", buffering=0) as file:
        record = Record(file, start + moved, length - 50 if moved else length)
        with pytest.raises(ValueError, match=message):
            record.read_region(torch.zeros(shape), shape, (0, 0))


def test_a_file_that_became_shorter_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TENSORS["matrix"]
    start, length = saved(tensor, tmp_path / "file")
    with (tmp_path / "file").open("rb", buffering=0) as file:
        record = Record(file, start, length)
        where = record.elements(tensor.nbytes)
        monkeypatch.setattr(record, "elements", lambda nbytes: where)
        os.truncate(tmp_path / "file", start + where + 4 * math.prod((6, 5)))
        with pytest.raises(ValueError, match="ends 20 bytes early"):
            record.read_region(torch.zeros(7, 5), tensor.shape, (0, 0))
