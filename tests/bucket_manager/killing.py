"""Kills one rank of a training at each place where it can be, and times the others' errors.

Ranks that have raised live on until the last has its error, as under a debugger, in a notebook, or where a script
catches the error: no rank is helped by another's end.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerox
import zerox.calls.grad_calls
import zerox.checkpoint.store
import zerox.update.update
from tests.mortal_ranks import MortalRanks, start_ranks
from zerox.params.params import ParamGather
from zerox.ranks.group import Ranks

PLACES = ("constructor", "forward", "backward", "clip", "step", "gather", "save", "between steps")
STEPS = 4
DEADLY_STEP = 2
TIMEOUT_S = 60.0  # of the group: what a rank waits that nothing wakes
DEATH = "death"


class Training:
    """A small model with four buckets; rank ``victim`` is killed at ``place``, or nobody if it is None."""

    def __init__(self, rank: int, stage: int, place: str | None, folder: Path) -> None:
        self.place, self.folder = place, folder
        if place == "constructor":
            self.die_at_call(Ranks, "broadcast", 2)
        torch.manual_seed(rank)
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.optimizer = zerox.FusedShardedAdam(self.model.named_parameters(), stage=stage, bucket_cap_mb=0.0167)

    def die(self, *_: Any) -> None:
        (self.folder / DEATH).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at_call(self, owner: Any, name: str, nth: int) -> None:
        """This rank dies when ``owner.name`` is called for the nth time from now."""
        inside: Callable[..., Any] = getattr(owner, name)
        calls = itertools.count(1)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == nth:
                self.die()
            return inside(*args, **kwargs)

        setattr(owner, name, wrapped)

    def arm(self) -> None:
        """In this step the rank dies."""
        if self.place == "forward":
            self.model[2].register_forward_hook(self.die)
        elif self.place == "backward":
            self.model[1].register_forward_hook(self.die_in_its_backward)
        elif self.place == "clip":
            self.die_at_call(zerox.calls.grad_calls, "total_limbs", 1)
        elif self.place == "step":
            self.die_at_call(zerox.update.update, "update", 2)
        elif self.place == "gather":
            self.die_at_call(ParamGather, "end_step", 1)
        elif self.place == "save":
            self.die_at_call(zerox.checkpoint.store, "write_parts", 1)
        elif self.place == "between steps":
            self.die()

    def die_in_its_backward(self, _: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(self.die)

    def run(self) -> None:
        for step in range(STEPS):
            if step == DEADLY_STEP:
                self.arm()
            self.model(torch.randn(4, 64)).square().mean().backward()
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == DEADLY_STEP:
                zerox.save(self.folder / "checkpoint", self.model, self.optimizer)


def train(
    rank: int, world_size: int, stage: int, place: str, exchange: str, victim: int, folder: str
) -> tuple[float, str] | None:
    """Seconds from the death to this rank's error, and what it says. None if there was none."""
    os.environ["ZEROX_EXCHANGE"] = exchange
    where = Path(folder)
    try:
        Training(rank, stage, place if rank == victim else None, where).run()
    except Exception as error:
        seconds = time.monotonic() - float((where / DEATH).read_text())
        (where / f"{rank} has raised").touch()
        while len(list(where.glob("* has raised"))) < world_size - 1:
            time.sleep(0.01)
        return seconds, str(error)
    return None


class NoError(Exception):
    """A rank went on, or hung, where another had died."""


def kill_one(
    world_size: int, stage: int, place: str, victim: int, exchange: str, folder: Path, limit_s: float
) -> list[tuple[float, str]]:
    """Of each survivor: seconds from the death to its error, and what that says. NoError if one has none in time."""
    folder.mkdir()
    args = (stage, place, exchange, victim, str(folder))
    run: MortalRanks = start_ranks(train, world_size, *args, folder=folder / "ranks", timeout_s=TIMEOUT_S)
    try:
        survivors = [rank for rank in range(world_size) if rank != victim]
        answers = [run.answer(rank, within_s=limit_s) for rank in survivors]
    finally:
        run.close()
    for rank, answer in zip(survivors, answers, strict=True):
        if not isinstance(answer, tuple):
            what = f"{world_size} ranks, stage {stage}, rank {victim} killed in {place}: rank {rank}"
            raise NoError(f"{what} had no error within {limit_s:g} s" if answer is None else f"{what}: {answer}")
    return answers
