"""Elements of a tensor that torch.save() wrote into a file among others, read straight into their place.

torch.load() makes the whole tensor first, and unpickles facts that the checkpoint's metadata has too.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ELEMENTS = "/data/0"  # in torch.save()'s archive of one tensor
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip archive's member; then its name and extra field, of these lengths


class Record(io.RawIOBase):
    """The bytes that one torch.save() wrote into an open file: ``length`` of them, from ``start`` on."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self.file = file
        self.start = start
        self.length = length
        self.position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = max(0, offset + (0, self.position, self.length)[whence])
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Reads as many bytes as there are, also if the system gives fewer at a time."""
        left = memoryview(buffer)[: max(0, self.length - self.position)]
        wanted = len(left)
        while left and (count := os.preadv(self.file.fileno(), [left], self.start + self.position)):
            self.position += count
            left = left[count:]
        return wanted - len(left)

    def elements(self, nbytes: int) -> int:
        """Where the tensor's elements start, ``nbytes`` of them. Raises ValueError if they aren't there."""
        return self.start_of(self.member(nbytes))

    def member(self, nbytes: int) -> zipfile.ZipInfo:
        """The archive's member that has the tensor's elements, ``nbytes`` of them. Raises ValueError if there is none.

        Its CRC-32 is 0 if it was written after torch.serialization.set_crc32_options(False).
        """
        try:
            with zipfile.ZipFile(self) as archive:  # type: ignore[arg-type]
                found = [each for each in archive.infolist() if each.filename.endswith(ELEMENTS)]
        except zipfile.BadZipFile:
            found = []
        if [(each.compress_type, each.file_size) for each in found] != [(zipfile.ZIP_STORED, nbytes)]:
            raise ValueError(f"at byte {self.start} there is no tensor of {nbytes} bytes")
        return found[0]

    def part(self, member: zipfile.ZipInfo) -> bytes:
        """A small member, which is not compressed. Raises ValueError if the file ends before it."""
        self.seek(self.start_of(member))
        return self.read(member.file_size) or b""

    def start_of(self, member: zipfile.ZipInfo) -> int:
        """Where the bytes of a member of the archive start. Raises ValueError if the file ends before them."""
        self.seek(member.header_offset)
        header = self.read(LOCAL_HEADER.size) or b""
        if len(header) < LOCAL_HEADER.size:
            raise ValueError(f"the file ends before {member.filename}")
        return member.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(header))

    def is_whole(self) -> bool:
        """Whether it is as torch.save() wrote it, by the archive's own checksums."""
        try:
            with zipfile.ZipFile(self) as archive:  # type: ignore[arg-type]
                return archive.testzip() is None
        except Exception:  # zipfile raises anything for damaged archives
            return False

    def read_region(self, target: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """Fills ``target`` from the row-major tensor of ``shape``, from ``offsets`` on. Raises ValueError."""
        if not target.numel():
            return
        strides = torch.empty(tuple(shape), device="meta").stride()
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        count = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))
        start = self.elements(torch.Size(shape).numel() * target.itemsize) + first * target.itemsize
        if count == target.numel() and target.is_contiguous() and target.device.type == "cpu":
            self._read_tensor(target, start)
        else:
            found = torch.empty(count, dtype=target.dtype, device="cpu")
            self._read_tensor(found, start)
            target.copy_(found.as_strided(target.shape, strides))

    def _read_tensor(self, target: Tensor, start: int) -> None:
        """All bytes of a contiguous tensor of the host."""
        self.seek(start)
        view = bytes_in(target)
        torch.autograd.graph.increment_version(target)  # since no operator writes it
        if missing := len(view) - self.readinto(view):
            raise ValueError(f"the file ends {missing} bytes early")


def bytes_in(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU, which must live meanwhile."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
