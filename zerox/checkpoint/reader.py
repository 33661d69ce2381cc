"""Reads a checkpoint for torch.distributed.checkpoint (DCP), without running what a file asks for.

DCP's own reader unpickles ``.metadata`` freely. This one allows only the classes that it consists of, and reads only
the elements of tensors.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zerox import _torch
from zerox.checkpoint.manifest import METADATA, CheckpointError, open_regular
from zerox.checkpoint.records import Record

DCP = "torch.distributed.checkpoint"
CLASSES = {
    f"{DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
}


def _member(of: object, name: str) -> object:
    """getattr() as far as it is needed: Python 3.11.2 pickles members of enumerations as calls of it."""
    if of is not _torch.memory_formats():
        raise pickle.UnpicklingError(f"getattr of {of} does not belong in a checkpoint")
    return _torch.memory_formats()[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


def load_file(file: Path) -> Any:
    """The contents of a file of torch.save(), on the CPU. Raises OSError, and CheckpointError for any other file.

    It makes only tensors, numbers, strings, and lists and dicts of these: nothing that the file asks for is run.
    """
    with open_regular(file) as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's guesses at what the file may be
        try:
            return torch.load(io.BufferedReader(stream), weights_only=True, map_location="cpu")
        except OSError:
            raise
        except Exception as error:  # unpickling raises anything, and torch's text recommends running the file
            asked = re.search(r"GLOBAL (\S+)", str(error))
            if asked is None:
                raise CheckpointError(f"{file} was not written by torch.save(), or is damaged") from None
            raise CheckpointError(
                f"{file} asks for {asked[1]}, and zerox neither makes nor runs anything that a file asks for: save "
                "tensors, numbers, strings, and lists and dicts of these"
            ) from None


class CheckpointReader(FileSystemReader):
    """Raises pickle.UnpicklingError for metadata that names anything else than DCP's own classes. Reads it once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        with io.BufferedReader(open_regular(Path(self.path, METADATA))) as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} is no metadata of a checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._metadata = metadata
        return metadata

    def damaged_tensors(self, name: str) -> list[str]:
        """Names of tensors that the file ``name`` does not have as they were written, as far as is known."""
        try:
            metadata = self.read_metadata()
        except Exception:  # the metadata may be damaged too
            return []
        found: dict[str, None] = {}
        for index, place in (metadata.storage_data or {}).items():
            if place.relative_path == name and not self._is_whole(name, place.offset, place.length):
                found[index.fqn] = None
        return list(found)

    def _is_whole(self, name: str, offset: int, length: int) -> bool:
        try:
            with open_regular(Path(self.path, name)) as file:
                return Record(file, offset, length).is_whole()
        except OSError:
            return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises OSError, and CheckpointError if a file does not have what the metadata says."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            with open_regular(Path(self.path, name)) as file:
                for item in items:
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: io.FileIO, item: ReadItem, planner: LoadPlanner) -> None:
        found = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        try:
            shape = self._chunk(item.storage_index).sizes
            Record(file, found.offset, found.length).read_region(target, shape, item.storage_offsets)
        except ValueError as error:
            raise CheckpointError(f"{file.name} does not have {item.storage_index.fqn}: {error}") from None
        planner.commit_tensor(item, target)

    def _chunk(self, index: MetadataIndex) -> ChunkStorageMetadata:
        """The part of the tensor that the record has."""
        whole = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(whole, TensorStorageMetadata)
        if index.index is not None and whole.chunks[index.index].offsets == index.offset:
            return whole.chunks[index.index]
        return next(chunk for chunk in whole.chunks if chunk.offsets == index.offset)
