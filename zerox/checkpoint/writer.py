"""Writes a rank's part of a checkpoint as torch.distributed.checkpoint does, with memory for one tensor.

DCP's own writer copies every slice that is a view, and keeps all copies until its file is complete: a second copy of
the rank's whole share.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zerox import _torch
from zerox.checkpoint.manifest import CheckpointError


class SummedFile(io.BufferedWriter):
    """A new file, which is on the disk after a ``with`` block, with what manifest.checksum() will find in it.

    Raises OSError with the file's name: when the system refuses to write, torch.save() reports only its own state.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "xb") -> None:
        super().__init__(io.FileIO(path, mode))
        self.path = path
        self.nbytes = 0
        self.crc = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        with self._noting_failure():
            self.nbytes += super().write(data)
        self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def flush(self) -> None:
        with self._noting_failure():
            super().flush()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or OSError(error.errno, error.strerror, str(self.path))
            raise self.failure from None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.flush()
                os.fsync(self.fileno())
        finally:
            with suppress(OSError):  # it was noted
                self.close()
            if self.failure is not None and not isinstance(error, OSError):
                raise self.failure from None


def save_object(content: Any, path: str | os.PathLike[str], mode: str = "xb") -> tuple[int, int]:
    """torch.save() into a file, a new one unless ``mode`` says so: its bytes and CRC-32."""
    with SummedFile(path, mode) as file:
        torch.save(content, file)
    return file.nbytes, file.crc


class CheckpointWriter(FileSystemWriter):
    """One file a rank, which is on the disk when write_data() returns. ``written``: its bytes and CRC-32, by name."""

    written: dict[str, tuple[int, int]]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """DCP's would make the folder if a rank does not see it, and this rank's file would be lost there."""
        if not Path(self.path).is_dir():
            raise CheckpointError(
                f"{self.path}, which rank 0 made, is not there: all ranks must see one file system, and for a relative "
                "path have one working folder"
            )
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        with SummedFile(self.fs.concat_path(self.path, name)) as file:
            for item in plan.items:
                start = file.nbytes
                data: Any = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    file.write(data.getbuffer())
                else:
                    # A view would be saved with all of its storage. CheckpointReader expects the elements in a row.
                    torch.save(data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), file)
                length = file.nbytes - start
                results.append(WriteResult(item.index, length, _torch.storage_info(name, start, length)))
        self.written = {name: (file.nbytes, file.crc)}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
