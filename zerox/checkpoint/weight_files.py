"""Files that have weights: which ones a path stands for, and where in them each tensor lies.

Names of files come from other people's files, and lead nowhere but into the folder: see inside().
"""

from __future__ import annotations

import enum
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from zerox.checkpoint import manifest
from zerox.checkpoint.manifest import CheckpointError, is_safetensors, open_regular, some
from zerox.checkpoint.names import MODEL
from zerox.checkpoint.place import find
from zerox.checkpoint.reader import CheckpointReader
from zerox.checkpoint.safetensors_file import read_header, without_doubles
from zerox.checkpoint.store import Opened
from zerox.checkpoint.torch_file import read_torch
from zerox.checkpoint.unwrapped import RANK
from zerox.checkpoint.weight_folder import find as find_replaced

INDEX = ".index.json"
# As transformers looks for them: the first that is there is read.
IN_FOLDER = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
WEIGHT_MAP = "weight_map"
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of huggingface_hub's cache: links in one lead to files in the other


class Kind(enum.Enum):
    SAFETENSORS = "files of safetensors"
    TORCH = "files of torch.save()"
    CHECKPOINT = "a folder of zerox.save()"


class Chunk(NamedTuple):
    """A rectangle of a tensor, in a file from byte ``start`` on: its elements, or if ``record`` is not 0 a record of
    torch.save() of so many bytes that has them. They are row-major unless there are ``strides``."""

    file: str
    start: int
    record: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] = ()


class Stored(NamedTuple):
    """A tensor in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Seen(NamedTuple):
    """A file as one rank sees it: on another machine one of the same name may be another one."""

    nbytes: int
    device: int
    inode: int

    @staticmethod
    def of(file: io.FileIO) -> Seen:
        found = os.fstat(file.fileno())
        return Seen(found.st_size, found.st_dev, found.st_ino)


class WeightFiles(NamedTuple):
    """``files``: by name in ``folder``. ``others``: names of what is in them and is no tensor."""

    kind: Kind
    folder: Path
    files: dict[str, Seen]
    tensors: dict[str, Stored]
    others: tuple[str, ...] = ()


def find_weights(path: Path) -> WeightFiles:
    """Raises CheckpointError, which names the file, for what has no weights; OSError where the system refuses."""
    given, path = path, find_replaced(Path(os.path.abspath(path)))  # other ranks may have other working folders
    folder = find(path)
    if (folder / manifest.NAME).exists():
        return _of_checkpoint(folder)
    if path.is_dir():
        name = next((name for name in IN_FOLDER if os.path.lexists(path / name)), None)
        if name is None:
            names = sorted(each.name for each in os.scandir(path))
            holds = f"holds {some(names)}" if names else "is empty"
            raise CheckpointError(
                f"{path} {holds}, and none of {', '.join(IN_FOLDER)} and {manifest.NAME}: pass the path of a file of "
                "weights, or of the folder that has one of these"
            )
        return _of_index(path, name) if name.endswith(INDEX) else _of_files(path, [name])
    if not os.path.lexists(path):
        raise CheckpointError(
            f"nothing is there, and zerox downloads nothing: huggingface_hub.snapshot_download('{given}') returns the "
            "folder of a model on the Hub"
        )
    if path.name.endswith(INDEX):
        return _of_index(path.parent, path.name)
    real = Path(os.path.realpath(path))  # the caller named the link, so it is followed
    return _of_files(real.parent, [real.name])


def _of_files(folder: Path, names: Iterable[str], weight_map: Mapping[str, str] | None = None) -> WeightFiles:
    """``weight_map``: which of them has each tensor, as an index says."""
    names = list(names)
    kinds = {Kind.SAFETENSORS if _are_safetensors(inside(folder, name), name) else Kind.TORCH for name in names}
    if len(kinds) > 1:
        raise CheckpointError(f"some of {some(names)} are {' and others '.join(kind.value for kind in Kind)[:-1]}")
    kind = kinds.pop()
    files: dict[str, Seen] = {}
    tensors: dict[str, Stored] = {}
    others: list[str] = []
    for name in names:
        with open_regular(inside(folder, name)) as file:
            files[name] = Seen.of(file)
            found, its_others = tensors_in(kind, file, name)
        others += its_others
        for each in found:
            if each in tensors:
                raise CheckpointError(f"{folder / tensors[each].chunks[0].file} and {folder / name} both have '{each}'")
        tensors |= found
    if weight_map is not None:
        _check_map(folder, weight_map, tensors)
    return WeightFiles(kind, folder, files, tensors, tuple(others))


def tensors_in(kind: Kind, file: io.FileIO, name: str) -> tuple[dict[str, Stored], list[str]]:
    """Of an open file, which the folder has as ``name``: its tensors, and names of what else is in it."""

    def stored(dtype: torch.dtype, shape: tuple[int, ...], start: int, strides: tuple[int, ...] = ()) -> Stored:
        return Stored(dtype, shape, (Chunk(name, start, 0, (0,) * len(shape), shape, strides),))

    if kind is Kind.SAFETENSORS:
        return {each: stored(e.dtype, e.shape, e.start) for each, e in read_header(file).items()}, []
    entries, others = read_torch(file)
    return {each: stored(e.dtype, e.shape, e.start, e.strides) for each, e in entries.items()}, others


def _are_safetensors(file: Path, name: str) -> bool:
    return name.endswith(".safetensors") or is_safetensors(file)


# ---- an index of several files


def _of_index(folder: Path, index: str) -> WeightFiles:
    file = inside(folder, index)
    try:
        with io.BufferedReader(open_regular(file)) as stream:
            content = json.loads(stream.read(manifest.MOST_BYTES), object_pairs_hook=without_doubles)
        weight_map = content[WEIGHT_MAP]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"its '{WEIGHT_MAP}' has no names")
        if not all(isinstance(each, str) for each in weight_map.values()):
            raise ValueError(f"its '{WEIGHT_MAP}' has something else than names of files")
    except (KeyError, TypeError):
        raise CheckpointError(f"{file} has no '{WEIGHT_MAP}', as an index of weights has") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    return _of_files(folder, sorted(set(weight_map.values())), weight_map)


def _check_map(folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    """CheckpointError unless the files have what their index says, and nothing else."""
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].chunks[0].file != file:
            raise CheckpointError(f"{folder / file} does not have '{name}', which the index says is there")
    if unlisted := [name for name in tensors if name not in weight_map]:
        file = tensors[unlisted[0]].chunks[0].file
        raise CheckpointError(f"{folder / file} has {some(unlisted)}, which the index does not list")


def inside(folder: Path, name: str) -> Path:
    """The file of this name in the folder. CheckpointError for a name or a link that leads elsewhere, but for the links
    of huggingface_hub's cache."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise CheckpointError(f"{folder} names a file '{name}', which is not in that folder")
    file, base = folder / name, Path(os.path.realpath(folder))
    real = Path(os.path.realpath(file))
    is_blob = any(each.name == SNAPSHOTS and real.parent == each.parent / BLOBS for each in base.parents)
    if not (real.is_relative_to(base) or is_blob):
        raise CheckpointError(
            f"{file} is a link to {real}, outside of that folder, and is not followed: pass that file's own path, or "
            "copy it"
        )
    return file


# ---- zerox.save()


def _of_checkpoint(folder: Path) -> WeightFiles:
    """Sizes of files are compared with its manifest, and no checksums: all of them would have to be read. Those of
    records are compared where one is read whole."""
    listed = manifest.read(folder)["files"]
    manifest.check(folder, listed, contents=False)
    opened = Opened(folder, CheckpointReader(folder), {})
    opened.read_metadata(listed)
    if own := [name for name in opened.tensors if name.startswith(RANK) and MODEL in name]:
        raise CheckpointError(
            f"{folder} has parameters that are each rank's own, as {own[0]}: zerox.load() reads it, on as many ranks"
        )
    data = opened.reader.read_metadata().storage_data or {}
    tensors: dict[str, Stored] = {}
    for name, about in opened.tensors.items():
        if name.startswith(MODEL) and isinstance(about, TensorStorageMetadata):
            chunks = []
            for each in about.chunks:
                place = data[MetadataIndex(name, each.offsets)]
                where = str(place.relative_path), place.offset, place.length
                chunks.append(Chunk(*where, tuple(each.offsets), tuple(each.sizes)))
            tensors[name.removeprefix(MODEL)] = Stored(about.properties.dtype, tuple(about.size), tuple(chunks))
    files: dict[str, Seen] = {}
    for name in {chunk.file for stored in tensors.values() for chunk in stored.chunks}:
        with open_regular(folder / name) as file:
            files[name] = Seen.of(file)
    return WeightFiles(Kind.CHECKPOINT, folder, files, tensors)
