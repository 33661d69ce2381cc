"""Runs a function on ranks that are processes of one machine, each with one thread, over gloo."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

TIMEOUT = timedelta(minutes=5)


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """What ``function(*args)`` returns on rank 0. Raises what a rank raised; then all ranks are gone."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_serve, (world_size, folder, function, args), nprocs=world_size)
        return pickle.loads(Path(folder, "result").read_bytes())


def _serve(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        result = function(*args)
        if rank == 0:
            Path(folder, "result").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def largest(values: list[float]) -> list[float]:
    """Each one's maximum over the ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()
