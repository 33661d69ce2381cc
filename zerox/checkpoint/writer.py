"""Writes a rank's part of a checkpoint as torch.distributed.checkpoint does, in memory for one tensor.

DCP's own writer copies every slice that is a view, and keeps all copies until its file is complete: the whole share of
a rank once more.
"""

from __future__ import annotations

import io
import os
import zlib
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class SummedFile(io.BufferedWriter):
    """A new file, and what manifest.checksum() will find in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.nbytes = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        self.nbytes += super().write(data)
        self.crc = zlib.crc32(data, self.crc)
        return len(data)


class CheckpointWriter(FileSystemWriter):
    """One file a rank, which is on the disk when write_data() returns. ``written``: its bytes and CRC-32, by name."""

    written: dict[str, tuple[int, int]]

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
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        self.written = {name: (file.nbytes, file.crc)}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
