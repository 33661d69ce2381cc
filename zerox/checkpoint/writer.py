"""Writes a rank's part of a checkpoint as torch.distributed.checkpoint does, in memory for one tensor.

DCP's own writer copies every slice that is a view, and keeps all copies until its file is complete: the whole share of
a rank once more.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class CheckpointWriter(FileSystemWriter):
    """One file a rank, which is on the disk when write_data() returns."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        written: list[WriteResult] = []
        with open(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data: Any = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(data.getbuffer())
                else:
                    # A view would be saved with all of its storage.
                    torch.save(data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), stream)
                length = stream.tell() - start
                written.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done
