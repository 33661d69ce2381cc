"""Ranks as fresh processes with an environment of their own and a hard time limit: what hangs is killed.

The pool of tests/ranks.py serves all tests; a backend that may hang, or that a library is preloaded for, gets these.
Run as a program, this file is one such rank.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class ProcessesFailed(AssertionError):
    """Some rank raised, died or did not finish: the message has what each wrote last."""


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``function(rank, world_size, *args)`` on each rank of a group over ``backend``; returns what each returned."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = (function.__module__, function.__qualname__, world_size, backend, timeout_s, args)
        (folder / "task").write_bytes(pickle.dumps(task))
        environment = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                ranks.append(_start(folder, rank, environment))
            late = _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return _collect(folder, ranks, late, timeout_s)


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Which ranks did not finish in time."""
    deadline = time.monotonic() + timeout_s
    late = []
    for rank, process in enumerate(ranks):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    return late


def _start(folder: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"log{rank}").open("wb") as log:
        command = [sys.executable, "-m", "tests.gpu.processes", str(folder), str(rank)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _collect(folder: Path, ranks: list[subprocess.Popen[bytes]], late: list[int], timeout_s: float) -> list[Any]:
    results, failures = [], []
    for rank, process in enumerate(ranks):
        result = folder / f"result{rank}"
        if process.returncode == 0 and result.exists():
            results.append(pickle.loads(result.read_bytes()))
            continue
        ended = f"did not finish within {timeout_s:.0f} s" if rank in late else f"ended with {process.returncode}"
        log = (folder / f"log{rank}").read_text(errors="replace")
        failures.append(f"rank {rank} {ended}:\n{log[-3000:]}")
    if failures:
        raise ProcessesFailed("\n".join(failures))
    return results


def _serve(folder: Path, rank: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    module, name, world_size, backend, timeout_s, args = pickle.loads((folder / "task").read_bytes())
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    result = function(rank, world_size, *args)
    (folder / f"result{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"result{rank}.part").rename(folder / f"result{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
