"""Ranks for tests: a pool of processes that is started once, or threads of this process. Both communicate over gloo.

A rank function takes ``(rank, world_size, *args)``, is importable from its module, and returns something picklable.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import itertools
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.meshes import forget_meshes
from tests.mortal_ranks import FORKSERVER

TIMEOUT_S = 60


class RankFailed(AssertionError):
    """Some rank raised: the message has every rank's traceback."""


def forget_operators() -> None:
    """DTensor's cache of operators, a thread's own, keeps meshes and their groups. In a child that another thread forks
    torch destroys them, and hangs: zerox prevents it for the groups that it knows, but not for those of tests before.
    """
    if "torch.distributed.tensor" in sys.modules:
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def _freeze_imports(num_known: int) -> int:
    """What tests import stays, as in tests/frozen.py. Over a whole run it was so much that a quarter of all time went
    into looking through it: the collector's, and zerox's for living models."""
    if len(sys.modules) > num_known:
        gc.collect()  # of a test before
        gc.freeze()
    return len(sys.modules)


def _serve(pipe: Any) -> None:
    faulthandler.enable()  # what kills a rank comes with all its threads' stacks
    num_modules = 0
    while (task := pipe.recv()) is not None:  # which imports what it needs
        num_modules = _freeze_imports(num_modules)
        function, rank, world_size, store, timeout_s, args = task
        torch.set_num_threads(1)  # each time: frameworks set another number, and matrix products give other bits then
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            try:
                dist.barrier()  # a rank without messages must not leave while others still connect
                pipe.send((True, function(rank, world_size, *args)))
            finally:
                forget_operators()
                forget_meshes()
                dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """Processes that serve as ranks. Importing torch takes seconds, so all tests use the same ones, and they are forked
    from one that has."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []
        self.served: list[str] = []  # the last tests: what broke a process may have been an earlier one
        self.folder = tempfile.TemporaryDirectory()
        self.stores = itertools.count()

    def _grow(self, count: int) -> None:
        while len(self.workers) < count:
            here, there = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            self.workers.append((process, here))

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Runs ``function`` on ranks ``0 .. world_size - 1``; returns their results."""
        self._grow(world_size)
        self.served = [*self.served[-19:], f"{function.__module__}.{function.__name__} on {world_size}"]
        store = Path(self.folder.name) / str(next(self.stores))
        for rank in range(world_size):
            self.workers[rank][1].send((function, rank, world_size, store, timeout_s, args))
        results, failures = [], []
        for rank in range(world_size):
            process, pipe = self.workers[rank]
            if not pipe.poll(2 * timeout_s):
                failures.append(f"rank {rank}: no answer within {2 * timeout_s} s")
                continue
            try:
                done, value = pipe.recv()
            except EOFError:
                process.join(1)
                done = False
                value = f"the process died with exit code {process.exitcode}; it ran {', '.join(self.served)}"
            (results if done else failures).append(value if done else f"rank {rank}: {value}")
        if failures:
            self.close()  # ranks may be out of step: the next test gets fresh ones
            raise RankFailed("\n".join(failures))
        return results

    def close(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()


pool = Pool()
atexit.register(pool.close)
run_ranks = pool.run


class Once:
    """What ranks answer to a function that trains all cases of several tests: asked by the first of them, once."""

    def __init__(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> None:
        self.ask = functools.partial(run_ranks, function, world_size, *args, timeout_s=timeout_s)
        self.found: list[Any] | RankFailed | None = None

    def __call__(self) -> list[Any]:
        """By rank. Raises RankFailed for each test that needs them, if they failed."""
        if self.found is None:
            try:
                self.found = self.ask()
            except RankFailed as error:
                self.found = error
        if isinstance(self.found, RankFailed):
            raise self.found
        return self.found


def run_threads(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """The same with ranks as threads: ``function(group, *args)`` with a handmade gloo group, or None if alone."""
    if world_size == 1:
        return [function(None, *args)]
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: list[str] = []

    def serve(rank: int) -> None:
        try:
            group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, world_size)
            timeout = timedelta(seconds=timeout_s)
            backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, timeout)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            results[rank] = function(group, *args)
        except BaseException:
            failures.append(f"rank {rank}: {traceback.format_exc()}")

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s)
    if failures or any(thread.is_alive() for thread in threads):
        raise RankFailed("\n".join(failures) or "a rank did not finish")
    return results
