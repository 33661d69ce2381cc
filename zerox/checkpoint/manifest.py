"""The manifest, which makes a folder a checkpoint: the size and checksum of each of its files, written last.

A manifest may come from anywhere: no more of it is read than one can have, and it may list only files of zerox's.

docs/reference.md has the format of everything in that folder.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "zerox.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint: which file has which part of which tensor
HOST = "host.pt"  # everything but tensors of model and optimizer
DATA = r"__[0-9]+_[0-9]+\.distcp"
LISTED = re.compile(rf"{DATA}|{re.escape(METADATA)}|{re.escape(HOST)}")
WRITTEN = re.compile(rf"{LISTED.pattern}|{re.escape(METADATA)}\.tmp|{re.escape(NAME)}")  # also by half a save

OWN = "own"  # in HOST: a record of each rank that has parameters of its own
FORMAT = 2  # 2 may have masks
FORMAT_WITH_OWN = 3  # a reader that does not know each rank's own parameters would leave them out without a word
READ = (1, 2, 3)
CRC = "crc32"  # of the manifest itself, as compact JSON with sorted keys
CHUNK_BYTES = 2**22
MOST_BYTES = 2**26  # that a manifest can have: 100,000 ranks take a tenth of it
MOST_NAMES = 5
WEIGHTS_ALONE = (
    "safetensors, which has weights alone and no optimizer's state: load it by zerox.load_weights(optimizer, path), "
    "and call zerox.save() for a checkpoint"
)


class CheckpointError(RuntimeError):
    """A folder is no checkpoint, or a damaged one, or of something else. The text names the file or the tensor."""


def some(names: Sequence[str]) -> str:
    """The first of them, for a message."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"


def open_regular(file: Path) -> io.FileIO:
    """Opens a regular file to read it. OSError for anything else: a pipe may never answer, and a device has no end."""
    stream = io.FileIO(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return stream


def checksum(file: Path) -> tuple[int, int]:
    """The number of bytes, and their CRC-32."""
    total, crc = 0, 0
    with open_regular(file) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return total, crc


def sync(path: Path) -> None:
    """Waits until the disk has a file's contents, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(folder: Path, files: Mapping[str, tuple[int, int]], about: Mapping[str, Any], format: int = FORMAT) -> None:
    """Completes a checkpoint. ``files``: bytes and CRC-32 by name. ``about``: for people."""
    content = {"format": format, **about, "files": dict(sorted(files.items()))}
    file = folder / NAME
    file.write_text(json.dumps({**content, CRC: _crc(content)}, indent=1) + "\n")
    sync(file)
    sync(folder)


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError."""
    file = folder / NAME
    try:
        with io.BufferedReader(open_regular(file)) as stream:
            found = json.loads(stream.read(MOST_BYTES))
        if found.get("format", FORMAT) in READ and found.pop(CRC) != _crc(found):
            raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint: {_lack(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged") from None
    if found.get("format") not in READ:
        raise CheckpointError(f"{file} is of format {found.get('format')}: this zerox reads formats up to {max(READ)}")
    _check_sense(file, found)
    return dict(found)


def _lack(folder: Path) -> str:
    if not os.path.lexists(folder):
        return "nothing is there. zerox.latest() finds the last checkpoint in a folder"
    if folder.is_dir():
        return f"it has no {NAME}"
    if is_safetensors(folder):
        return f"it is a file of {WEIGHTS_ALONE}"
    return (
        "it is a file, and a checkpoint is a folder that zerox.save() wrote. torch.load() reads a file of "
        "torch.save(), and `python -m zerox convert` makes a checkpoint of one with a model and an optimizer"
    )


def is_safetensors(file: Path) -> bool:
    """Whether it begins as such files do: with the length of a JSON object."""
    try:
        with open_regular(file) as stream:
            first = stream.read(9)
    except OSError:
        return False
    return len(first) == 9 and first[8:] == b"{" and int.from_bytes(first[:8], "little") < 2**32


def _check_sense(file: Path, found: Mapping[str, Any]) -> None:
    """A checksum can be made up: raises CheckpointError for what no save writes, such as names outside the folder."""
    files, saved_at = found.get("files"), found.get("saved_at", 0.0)
    if not isinstance(files, dict) or not isinstance(saved_at, (int, float)) or not math.isfinite(saved_at):
        raise CheckpointError(f"{file} is damaged")
    for name, about in files.items():
        if not LISTED.fullmatch(name):
            raise CheckpointError(f"{file} lists '{name}', which is no file of a checkpoint")
        if not isinstance(about, list) or [type(each) for each in about] != [int, int]:
            raise CheckpointError(f"{file} is damaged at '{name}'")
    if missing := [name for name in (METADATA, HOST) if name not in files]:
        raise CheckpointError(f"{file} does not list {some(missing)}")


def check(
    folder: Path,
    files: Mapping[str, Sequence[int]],
    damaged_tensors: Callable[[str], list[str]] = lambda _: [],
    *,
    contents: bool,
) -> None:
    """Raises CheckpointError for the first file that is not as it was written: its kind, size and, if asked, contents.

    ``damaged_tensors(name)``: the tensors that the file does not have as they were.
    """
    for name, (nbytes, crc) in files.items():
        file = folder / name
        if what := _misfit(file, nbytes, crc if contents else None):
            tensors = damaged_tensors(name)
            lost = f", and with it {some(tensors)}" if tensors else ""
            raise CheckpointError(f"{file} of the checkpoint {what}{lost}")


def _misfit(file: Path, nbytes: int, crc: int | None) -> str:
    try:
        with open_regular(file) as stream:
            now = os.fstat(stream.fileno()).st_size
        if now != nbytes:
            return f"has {now} bytes instead of {nbytes}"
        if crc is not None and checksum(file) != (nbytes, crc):
            return "was changed after it was written"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return ""
