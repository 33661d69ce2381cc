"""A rank that has run out of batches follows the others, in each thing that ranks synchronize for: see join.py."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from zerox._C import SyncPoint
from zerox.grads.grads import Grads
from zerox.ranks.roll_call import summary_of


class Followed(Protocol):
    """What an optimizer has, and what else ranks follow."""

    @property
    def grads(self) -> Grads: ...
    def follow(self) -> SyncPoint: ...


class Followers:
    """A thread for each, since the others call them in any order. They end when all ranks follow."""

    def __init__(self, followed: Sequence[Followed]) -> None:
        self.followed = followed
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, first: int = 0) -> None:
        """All but the ``first``."""
        self.threads = [
            threading.Thread(target=self.run, args=(each,), name="zerox follows") for each in self.followed[first:]
        ]
        for thread in self.threads:
            thread.start()

    def run(self, one: Followed) -> None:
        device = one.grads.ranks.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                while one.follow() != SyncPoint.FOLLOW:
                    pass
            except BaseException as error:
                self.errors.append(error)
                leave(self.followed, error)

    def wait(self) -> None:
        """Raises what one of them raised first."""
        for thread in self.threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """The same, without waiting."""
        if self.errors:
            raise self.errors[0]


def follow(joined: Sequence[Followed]) -> None:
    """Until all ranks do."""
    followers = Followers(joined)
    followers.start(first=1)
    followers.run(joined[0])
    followers.wait()


def leave(followed: Iterable[Followed], error: BaseException) -> None:
    """The others raise this rank's error."""
    for each in followed:
        ranks = each.grads.ranks
        if ranks.failure_detector is not None:
            ranks.failure_detector.leave(f"rank {ranks.rank} raised {summary_of(error)} inside optimizer.join()")
