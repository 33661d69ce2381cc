"""Ranks that may die or be stopped: processes of their own, forked from one that has imported torch.

A rank function takes ``(rank, world_size, *args)`` and is importable from its module; its result is picklable. The rank
that fails calls :func:`fail_now` at its moment, so that nothing depends on a clock.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONNECT_S = 120
FORKSERVER = multiprocessing.get_context("forkserver")


# torch.optim imports dynamo when the first optimizer is made: seconds, which would count against short timeouts.
preloaded = ["torch._dynamo", "tests.bucket_manager.training", "zerox.checkpoint"]


def preload(*modules: str) -> None:
    """What the process that ranks are forked from imports too. It counts until that process is started."""
    preloaded.extend(modules)
    FORKSERVER.set_forkserver_preload([*preloaded, "tests.frozen"])


preload()


def fail_now(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)


def _serve(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, timeout_s: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]

    # torch has a timeout of its own to connect: many ranks start at once, which takes longer than a short one.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=CONNECT_S))
    store.set(f"{rank} has connected", "")  # nobody fails before all have
    store.wait([f"{other} has connected" for other in range(world_size)])
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    try:
        answer = function(rank, world_size, *args)
    except BaseException:
        answer = traceback.format_exc()
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(answer))
    part.rename(Path(folder, str(rank)))


@dataclass
class MortalRanks:
    """Processes under way; each leaves its answer in ``folder``."""

    processes: list[BaseProcess]
    folder: Path

    def answer(self, rank: int, within_s: float) -> Any:
        """The result of the rank's function; None if the process died before, or has no answer in time."""
        self.processes[rank].join(within_s)
        path = self.folder / str(rank)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def wake(self, rank: int) -> None:
        os.kill(self.processes[rank].pid or 0, signal.SIGCONT)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, folder: Path, timeout_s: float
) -> MortalRanks:
    folder.mkdir(parents=True)
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        process = FORKSERVER.Process(
            target=_serve, args=(function, rank, world_size, str(folder), timeout_s, args), daemon=True
        )
        process.start()
        processes.append(process)
    return MortalRanks(processes, folder)
