"""Files that have weights: which ones a path stands for, and where in them each tensor lies.

Names of files come from other people's files, and lead nowhere but into the folder: see inside().
"""

from __future__ import annotations

import enum
import errno
import io
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from zerox.checkpoint import manifest
from zerox.checkpoint.manifest import CheckpointError, is_safetensors, open_regular, some
from zerox.checkpoint.names import MODEL
from zerox.checkpoint.place import find
from zerox.checkpoint.reader import CheckpointReader
from zerox.checkpoint.safetensors_file import read_header, without_doubles
from zerox.checkpoint.store import Opened
from zerox.checkpoint.unwrapped import RANK
from zerox.checkpoint.weight_folder import find as find_replaced

INDEX = ".index.json"
# As transformers looks for them: the first that is there is read.
IN_FOLDER = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
WEIGHT_MAP = "weight_map"
OF_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save()'s first bytes before it wrote zip archives
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of huggingface_hub's cache: links in one lead to files in the other


class Kind(enum.Enum):
    SAFETENSORS = "files of safetensors"
    TORCH = "files of torch.save()"
    CHECKPOINT = "a folder of zerox.save()"


class Chunk(NamedTuple):
    """A rectangle of a tensor, row-major in a file from byte ``start`` on: its elements, or if ``record`` is not 0 a
    record of torch.save() of so many bytes that has them. Of a file of torch.save() torch knows where."""

    file: str
    start: int
    record: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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
            if kind is Kind.SAFETENSORS:
                found = {
                    each: Stored(e.dtype, e.shape, (Chunk(name, e.start, 0, (0,) * len(e.shape), e.shape),))
                    for each, e in read_header(file).items()
                }
        if kind is Kind.TORCH:
            content = read_torch(inside(folder, name))
            others += [each for each, value in content.items() if not isinstance(value, Tensor)]
            found = {
                each: Stored(v.dtype, tuple(v.shape), (Chunk(name, 0, 0, (0,) * v.dim(), tuple(v.shape)),))
                for each, v in content.items()
                if isinstance(v, Tensor)
            }
        for each in found:
            if each in tensors:
                raise CheckpointError(f"{folder / tensors[each].chunks[0].file} and {folder / name} both have '{each}'")
        tensors |= found
    if weight_map is not None:
        _check_map(folder, weight_map, tensors)
    return WeightFiles(kind, folder, files, tensors, tuple(others))


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


# ---- torch.save()


def read_torch(file: Path) -> dict[str, Any]:
    """What torch.save() wrote of a state_dict(), its tensors mapped from the file: elements are read where they are
    used. Nothing that the file asks for is run. Raises CheckpointError with the file's name, and OSError."""
    open_regular(file).close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's guesses at what the file may be
        try:
            content = torch.load(str(file), mmap=True, weights_only=True, map_location="cpu")
        except Exception as error:  # unpickling raises anything, and torch's text recommends running the file
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is that of an archive cut short
                raise
            raise CheckpointError(f"{file} {_why_unread(file, str(error))}") from None
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{file} has a {type(content).__name__}, and is to have a model's state_dict()")
    if content and not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{file} has no tensors by their names, but {some([repr(name) for name in content])}: save the one that is "
            "the model's state_dict() to a file of its own"
        )
    for name, value in content.items():
        if isinstance(value, Tensor) and (type(value) not in (Tensor, torch.nn.Parameter) or not _is_plain(value)):
            raise CheckpointError(f"{file} has '{name}' as a {type(value).__name__} of {value.layout}, not as a tensor")
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in content.items()}


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _why_unread(file: Path, text: str) -> str:
    if asked := re.search(r"GLOBAL (\S+)", text):
        return (
            f"asks for {asked[1]}, and zerox neither makes nor runs anything that a file asks for: save tensors, "
            "numbers, strings, and lists and dicts of these"
        )
    with open_regular(file) as stream:
        is_old = stream.read(len(OF_OLD_FORMAT)) == OF_OLD_FORMAT
    if is_old:
        return "is in torch's old format, which can't be mapped: load it with torch.load() and save it again"
    return "was not written by torch.save(), or is damaged"


# ---- zerox.save()


def _of_checkpoint(folder: Path) -> WeightFiles:
    """Sizes of files are compared with its manifest, and no checksums: all of them would have to be read."""
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
