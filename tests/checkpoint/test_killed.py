"""Killed at any moment of a save: there is a checkpoint that loads, the last one or the one that was being saved."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_store import alone
from tests.mortal_ranks import FORKSERVER
from zerox import CheckpointError, latest, load, save

NUM_KILLS = 30
LONGEST_S = 60.0


def be_a_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=LONGEST_S),
        )


def save_for_ever(rank: int, world_size: int, folder: str, first: int, said: Any) -> None:
    be_a_rank(rank, world_size, folder)
    model, optimizer = alone()
    for count in range(first, first + 1000):
        if rank == 0:
            said.send(count)
        save(f"{folder}/x", model, optimizer, extra=count)


@contextlib.contextmanager
def saving(
    world_size: int, folder: Path, first: int, saves: Callable[..., None] = save_for_ever
) -> Iterator[tuple[list[Any], Any]]:
    """The processes, and where rank 0 tells what it begins to save. All are gone afterwards."""
    heard, said = FORKSERVER.Pipe(duplex=False)
    processes = [
        FORKSERVER.Process(target=saves, args=(rank, world_size, str(folder), first, said), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes, heard
    finally:
        for process in processes:
            process.kill()
            process.join()
        (folder / "store").unlink(missing_ok=True)


def last_said(heard: Any) -> int:
    """Once two saves have begun, and so one is over."""
    count = -1
    for _ in range(2):
        assert heard.poll(LONGEST_S)
        count = heard.recv()
    return count


def later(heard: Any, count: int) -> int:
    while heard.poll():
        count = heard.recv()
    return count


def test_thirty_kills_leave_thirty_checkpoints_that_load(tmp_path: Path) -> None:
    rng = random.Random(1)
    model, optimizer = alone()
    kept = 0
    for _ in range(NUM_KILLS):
        with saving(1, tmp_path, kept) as ([process], heard):
            count = last_said(heard)
            time.sleep(rng.random() * 0.06)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            with contextlib.suppress(EOFError):
                count = later(heard, count)
        assert latest(tmp_path) == tmp_path / "x"
        kept = load(tmp_path / "x", model, optimizer)
        assert kept in (count - 1, count), "what was saved before, or what was being saved"


class Killed(BaseException):
    pass


def until(steps: Iterator[int], error: BaseException, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the function, or raises if ``steps`` count down to 0 with it. Then they count no more."""
    if next(steps, None) == 0:
        raise error
    return function(*args, **kwargs)


def test_at_every_step_on_the_disk_there_is_a_checkpoint_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a kill at random moments hardly ever comes: between two renames."""
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer, extra="old")
    for survived in itertools.count():
        steps = iter(range(survived, -1, -1))
        with monkeypatch.context() as killing:
            for name in ("rename", "mkdir", "unlink", "rmdir", "fsync"):
                killing.setattr(os, name, partial(until, steps, Killed(), getattr(os, name)))
            try:
                save(tmp_path / "x", model, optimizer, extra="new")
            except (Killed, CheckpointError):
                is_over = False
            else:
                is_over = True
        assert latest(tmp_path) == tmp_path / "x", f"killed after {survived} steps"
        assert load(tmp_path / "x", model, optimizer) in (("new",) if is_over else ("old", "new"))
        if is_over:
            break
    assert survived > 10
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_is_killed(tmp_path: Path, victim: int) -> None:
    rng = random.Random(victim)
    model, optimizer = alone()
    kept = 0
    for _ in range(3):
        with saving(2, tmp_path, kept) as (processes, heard):
            count = last_said(heard)
            time.sleep(rng.random() * 0.08)
            os.kill(processes[victim].pid, signal.SIGKILL)
            processes[1 - victim].join(LONGEST_S)
            assert processes[1 - victim].exitcode == 1, "the other one raised"
            with contextlib.suppress(EOFError):
                count = later(heard, count)
        kept = load(tmp_path / "x", model, optimizer)
        assert kept in (count - 1, count)
