"""Where elements lie in a file of torch.save(), which torch reads whole, or maps: zerox reads ranges of it.

Such a file is a zip archive, in which a storage is a member that is not compressed. torch.load() onto the meta device
reads what describes the tensors, and says where each one's storage begins.

A mapped file would end the process (SIGBUS) if somebody cut it meanwhile; what is read by calls of the system is an
error then.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox import _torch
from zerox.checkpoint.manifest import CheckpointError, some
from zerox.checkpoint.records import Record

OF_ARCHIVES = b"PK\x03\x04"
OF_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save()'s first bytes before it wrote zip archives
BYTE_ORDER = "/byteorder"
NOT_TORCHS = "was not written by torch.save(), or is damaged"


class Entry(NamedTuple):
    """A tensor in a file: its first element is at byte ``start``, and the others lie by ``strides``, in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def read_torch(file: io.FileIO) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a state_dict() that torch.save() wrote into an open file, and names of what else it has. Nothing
    that the file asks for is run. Raises CheckpointError with the file's name, and OSError."""
    path = os.fsdecode(file.name)
    _check_kind(file, path)
    members = _members(file, path)
    content = _load(file, path)
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} has a {type(content).__name__}, and is to have a model's state_dict()")
    if content and not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} has no tensors by their names, but {some([repr(name) for name in content])}: save the one that is "
            "the model's state_dict() to a file of its own"
        )
    found, others = {}, []
    for name, value in content.items():
        if not isinstance(value, Tensor):
            others.append(name)
            continue
        if why := _unfit(value):
            raise CheckpointError(f"{path} has '{name}' {why}")
        offset, nbytes = _torch.offset_in_file(value), value.untyped_storage().nbytes()
        if offset is None or members.get(offset, -1) < nbytes:
            raise CheckpointError(
                f"{path} does not have the {nbytes} bytes of '{name}' as torch.save() writes them: load it with "
                "torch.load() and save it again"
            )
        start = offset + int(value.storage_offset()) * value.itemsize
        found[name] = Entry(value.dtype, tuple(value.shape), tuple(map(int, value.stride())), start)
    return found, others


def _whole(file: io.FileIO) -> Record:
    return Record(file, 0, os.fstat(file.fileno()).st_size)


def _check_kind(file: io.FileIO, path: str) -> None:
    first = _whole(file).read(len(OF_OLD_FORMAT)) or b""
    if first == OF_OLD_FORMAT:
        raise CheckpointError(
            f"{path} is in torch's old format, which can't be read in parts: torch.load() it and save it again"
        )
    if not first.startswith(OF_ARCHIVES):
        raise CheckpointError(f"{path} {NOT_TORCHS}")


def _members(file: io.FileIO, path: str) -> dict[int, int]:
    """By where they begin, how many bytes those members have that are not compressed. CheckpointError for another order
    of bytes, over which torch.load() onto the meta device would crash."""
    whole = _whole(file)
    try:
        with zipfile.ZipFile(whole) as archive:  # type: ignore[arg-type]
            listed = archive.infolist()
            stored = [each for each in listed if each.compress_type == zipfile.ZIP_STORED]
            # torch may have been told to leave out the checksums, without which zipfile reads nothing.
            asked = [each for each in listed if each.filename.endswith(BYTE_ORDER)]
            orders = [whole.part(each) if each in stored else archive.read(each) for each in asked]
        found = {whole.start_of(each): each.file_size for each in stored}
    except OSError:
        raise
    except Exception:  # zipfile raises anything for damaged archives
        raise CheckpointError(f"{path} {NOT_TORCHS}") from None
    if any(order != sys.byteorder.encode() for order in orders):
        raise CheckpointError(
            f"{path} was written on a machine with another order of bytes: load it with torch.load() and save it again"
        )
    return found


def _load(file: io.FileIO, path: str) -> Any:
    """Tensors in it are on the meta device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's guesses at what the file may be
        try:
            return torch.load(io.BufferedReader(_whole(file)), weights_only=True, map_location="meta", mmap=False)
        except OSError:
            raise
        except Exception as error:  # unpickling raises anything, and torch's text recommends running the file
            if asked := re.search(r"GLOBAL (\S+)", str(error)):
                raise CheckpointError(
                    f"{path} asks for {asked[1]}, and zerox neither makes nor runs anything that a file asks for: save "
                    "tensors, numbers, strings, and lists and dicts of these"
                ) from None
            raise CheckpointError(
                f"{path} can't be loaded onto the meta device ({type(error).__name__}): it is damaged, or a tensor in "
                "it is not dense"
            ) from None


def _unfit(value: Tensor) -> str:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return f"as a {type(value).__name__} of {value.layout}, not as a tensor"
    if value.is_conj() or value.is_neg():
        return "as a view that conjugates or negates: save what its resolve_conj().resolve_neg() returns"
    return ""
