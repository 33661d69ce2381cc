"""The header of a safetensors file, read and made by hand: zerox reads and writes ranges of such files, and the package
safetensors whole tensors.

Eight bytes have the header's length, little-endian. It is JSON: by name a tensor's dtype, its shape and where its bytes
begin and end behind the header. Bytes of all tensors lie there without holes, each row-major.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from zerox.checkpoint.manifest import CheckpointError

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # as the package safetensors has it
ALIGN_BYTES = 8  # of where tensors begin
METADATA = "__metadata__"  # strings by strings, for people
# In the order in which the package writes tensors: large elements first, so that each lies at a multiple of its size.
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file: its bytes are ``[start, stop)`` of the file, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class DamagedHeader(ValueError):
    """Without the file's name."""


def read_header(file: io.FileIO) -> dict[str, Entry]:
    """The tensors of an open file by their names, in the order of their bytes. Raises CheckpointError with the file's
    name for anything that is no safetensors file, or not all of it; OSError where the system refuses."""
    try:
        nbytes = os.fstat(file.fileno()).st_size
        first = os.pread(file.fileno(), LENGTH_BYTES, 0)
        length = int.from_bytes(first, "little")
        if len(first) < LENGTH_BYTES or length > nbytes - LENGTH_BYTES:
            raise DamagedHeader(f"it has {nbytes} bytes, and a header of {length}")
        if length > MOST_HEADER_BYTES:
            raise DamagedHeader(f"its header has {length} bytes, and may have {MOST_HEADER_BYTES}")
        return parse_header(os.pread(file.fileno(), length, LENGTH_BYTES), nbytes)
    except DamagedHeader as error:
        raise CheckpointError(f"{os.fsdecode(file.name)} is no whole safetensors file: {error}") from None


def parse_header(header: bytes, nbytes: int) -> dict[str, Entry]:
    """``header``: without its length. ``nbytes``: of the whole file. Raises DamagedHeader."""
    try:
        found = json.loads(header.decode(), object_pairs_hook=without_doubles)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise DamagedHeader("its header is no JSON") from None
    except ValueError as error:  # also Python's own, for a number of thousands of digits
        raise DamagedHeader(str(error)) from None
    if not isinstance(found, dict):
        raise DamagedHeader("its header is no JSON object")
    about = found.pop(METADATA, None) or {}
    if not isinstance(about, dict) or not all(isinstance(each, str) for each in about.values()):
        raise DamagedHeader(f"{METADATA} is no dict of strings")
    first = LENGTH_BYTES + len(header)
    entries = {name: _entry(name, each, first) for name, each in found.items()}
    in_order = dict(sorted(entries.items(), key=lambda each: (each[1].start, each[1].stop)))
    end = first
    for name, entry in in_order.items():
        if entry.start != end:
            raise DamagedHeader(f"'{name}' begins at byte {entry.start}, and the tensor before it ends at byte {end}")
        end = entry.stop
    if end != nbytes:
        raise DamagedHeader(f"it has {nbytes} bytes, and its tensors end at byte {end}")
    return in_order


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file of these tensors (name, dtype, shape), up to where the first one begins, and where each
    lies in the file: the bytes that the package safetensors writes. ValueError for a dtype that it does not know."""
    ranks = {name: rank for rank, name in enumerate(DTYPES)}
    given = [(name, _name_of(name, dtype), tuple(shape)) for name, dtype, shape in tensors]
    content: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name, dtype, shape in sorted(given, key=lambda each: (ranks[each[1]], each[0])):
        if name in content or name == METADATA:
            raise ValueError(f"two tensors of one file can't have the name '{name}'")
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN_BYTES)
    first = LENGTH_BYTES + len(text)
    content.pop(METADATA, None)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, {
        name: _entry(name, each, first) for name, each in content.items()
    }


def _name_of(name: str, dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise ValueError(f"'{name}' is {dtype}, which safetensors files do not have")
    return NAMES[dtype]


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(): ValueError for a name that an object has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has '{next(name for name in names if names.count(name) > 1)}' twice")
    return found


def _entry(name: str, about: Any, first: int) -> Entry:
    """``first``: where bytes of tensors begin in the file."""
    if not isinstance(about, dict):
        raise DamagedHeader(f"its header is damaged at '{name}'")
    dtype, shape, offsets = (about.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_numbers(shape) or not _are_numbers(offsets) or len(offsets) != 2:
        raise DamagedHeader(f"its header is damaged at '{name}'")
    if dtype not in DTYPES:
        raise DamagedHeader(f"'{name}' has the dtype {dtype}, which zerox does not know")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise DamagedHeader(
            f"'{name}', {dtype} of shape {shape}, has {offsets[1] - offsets[0]} bytes and needs {needed}"
        )
    return Entry(DTYPES[dtype], tuple(shape), first + offsets[0], first + offsets[1])


def _are_numbers(given: Any) -> TypeGuard[list[int]]:
    return isinstance(given, list) and all(type(each) is int and 0 <= each < 2**63 for each in given)
