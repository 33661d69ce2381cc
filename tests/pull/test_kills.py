"""Killed in the middle of a save: an owner that is read, and the rank that saves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.mortal_ranks import start_ranks
from tests.pull.test_by_message import by_message
from tests.pull.test_rank_0_saves import assert_same, loaded, saved, trained

SOON_S = 2.0
Rank = Callable[..., Any]


def directly(rank: int, world_size: int, function: Rank, *args: Any) -> Any:
    return function(rank, world_size, *args)


WAYS = {"in memory": directly, "by message": by_message}


def has_state(process: int, *states: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in states
    except FileNotFoundError:
        return "Z" in states


class Kills:
    """Pickled between two tensors: kills a process, and is through when it has ended."""

    def __init__(self, process: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.process, self.how, self.at = process, how, 0.0

    def __reduce__(self) -> Any:
        self.at = time.monotonic()
        os.kill(self.process, self.how)
        while not has_state(self.process, *("T" if self.how == signal.SIGSTOP else "ZX")):
            time.sleep(0.001)
        return int, ()


def processes() -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def owner_is_killed(rank: int, world_size: int, path: Path, how: signal.Signals) -> str:
    """Between two tensors that it has parts of; or, if it is stopped there, while it is asked for the second."""
    _, optimizer = trained(rank, "fp32")
    entries, owner = list(optimizer.state_dict()["state"].values()), processes()[1]
    dist.barrier()
    if rank == 1:
        time.sleep(60)
    kills = Kills(owner, how)
    if how == signal.SIGSTOP:
        threading.Timer(0.5, os.kill, (owner, signal.SIGKILL)).start()
    half = len(entries) // 2
    try:
        torch.save({"first": entries[:half], "between": kills, "rest": entries[half:]}, path)
    except RuntimeError as error:
        return f"{time.monotonic() - kills.at:.3f} {error}"
    return "saved"


@pytest.mark.parametrize(
    ("way", "how"), [*((way, signal.SIGKILL) for way in WAYS), ("by message", signal.SIGSTOP)], ids=str
)
def test_an_owner_that_is_killed_in_the_middle_of_a_save_is_named(
    way: str, how: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    ranks = start_ranks(WAYS[way], 2, owner_is_killed, path, how, folder=tmp_path / "ranks", timeout_s=60)
    try:
        took, _, error = ranks.answer(0, within_s=60).partition(" ")
    finally:
        ranks.close()
    assert "rank 1" in error
    assert float(took) < SOON_S + (0.5 if how == signal.SIGSTOP else 0.0)
    with pytest.raises(RuntimeError, match=r"data\.pkl"):  # what torch leaves where pickling raises
        torch.load(path, weights_only=True)


def saver_is_killed(rank: int, world_size: int, folder: Path) -> str:
    """By a script that writes beside its last file, and renames. Rank 1 says how long its next step() took."""
    _, optimizer = trained(rank, "fp32")
    saver = processes()[0]
    if rank == 0:
        torch.save(optimizer.state_dict(), folder / "last")
        shown = optimizer.state_dict()
        (folder / "kept").write_bytes(saved(shown))
        torch.save({"killed": Kills(saver), **shown}, folder / "next")
        (folder / "next").rename(folder / "last")
    while not has_state(saver, "Z", "X"):
        time.sleep(0.001)
    start = time.monotonic()
    try:
        optimizer.step()
    except RuntimeError as error:
        return f"{time.monotonic() - start:.3f} {error}"
    return "stepped"


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed_while_it_saves_is_named_and_leaves_the_last_file(way: str, tmp_path: Path) -> None:
    ranks = start_ranks(WAYS[way], 2, saver_is_killed, tmp_path, folder=tmp_path / "ranks", timeout_s=60)
    try:
        took, _, error = ranks.answer(1, within_s=60).partition(" ")  # and its process has ended
    finally:
        ranks.close()
    assert "rank 0" in error
    assert float(took) < SOON_S
    last, kept = ((tmp_path / name).read_bytes() for name in ("last", "kept"))
    assert_same(loaded(last), loaded(kept))
