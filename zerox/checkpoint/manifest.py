"""What makes a folder a checkpoint: a manifest with the size and checksum of each of its files, written last.

A checkpoint is written beside its place, under a name of its own, and takes its place when it is complete: at any
moment the place has the old checkpoint, the new one, or, while one takes the other's place, the old one is ``aside``.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = "zerox.json"
FORMAT = 1
CRC = "crc32"  # of the manifest itself, as compact JSON with sorted keys
CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A folder is no checkpoint, or a damaged one, or of something else. Names the file or the tensor."""


MOST_NAMES = 5


def saving(path: Path) -> Path:
    """Where the checkpoint ``path`` is written."""
    return path.with_name(f".{path.name}.saving")


def aside(path: Path) -> Path:
    """Where its predecessor waits until it has taken its place."""
    return path.with_name(f".{path.name}.replaced")


def places(folder: Path) -> set[Path]:
    """Where checkpoints in ``folder`` may be: also where one is aside, but not where one is being written."""
    found = set()
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.name.startswith(".") and each.name.endswith(".replaced"):
            found.add(each.with_name(each.name.removeprefix(".").removesuffix(".replaced")))
        elif not (each.name.startswith(".") and each.name.endswith(".saving")):
            found.add(each)
    return found


def checksum(file: Path) -> tuple[int, int]:
    """Bytes, and their CRC-32."""
    total, crc = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return total, crc


def sync(path: Path) -> None:
    """Until the disk has what was written to a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(folder: Path, files: Mapping[str, tuple[int, int]], about: Mapping[str, Any]) -> None:
    """Completes a checkpoint. ``files``: bytes and CRC-32 by name. ``about``: for people."""
    content = {"format": FORMAT, **about, "files": dict(sorted(files.items()))}
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
        found = json.loads(file.read_text())
        if found.get("format", FORMAT) == FORMAT and found.pop(CRC) != _crc(found):
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {NAME}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} is damaged") from None
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of format {found.get('format')}: this zerox reads format {FORMAT}")
    return dict(found)


def check(folder: Path, files: Mapping[str, Iterable[int]], damaged_tensors: Callable[[str], list[str]]) -> None:
    """Raises CheckpointError for the first file that is not as it was written.

    ``damaged_tensors``: which tensors a file of that name does not have as they were.
    """
    for name, (nbytes, crc) in files.items():
        file = folder / name
        try:
            now = checksum(file)
        except OSError as error:
            what = f"can't be read: {error.strerror}{_with(damaged_tensors(name))}"
            raise CheckpointError(f"{file} of the checkpoint {what}") from None
        if now != (nbytes, crc):
            what = f"has {now[0]} bytes instead of {nbytes}" if now[0] != nbytes else "was changed after it was written"
            raise CheckpointError(f"{file} of the checkpoint {what}{_with(damaged_tensors(name))}")


def _with(tensors: list[str]) -> str:
    more = f" and {len(tensors) - MOST_NAMES} more" if len(tensors) > MOST_NAMES else ""
    return f", and with it {', '.join(tensors[:MOST_NAMES])}{more}" if tensors else ""


def place(path: Path) -> None:
    """Puts the complete checkpoint in saving(path) where it belongs."""
    old = aside(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    saving(path).rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def find(path: Path) -> Path:
    """The folder of the checkpoint ``path``: its predecessor's where it was about to be replaced."""
    return aside(path) if not path.exists() and (aside(path) / NAME).exists() else path
