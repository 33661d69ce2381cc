"""Ranks that come to the constructor, and refusals there: through the store, before there is a group of our own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from multiprocessing import parent_process
from types import TracebackType
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from zerox import _C as C
from zerox.ranks.calls import say_after
from zerox.ranks.neighbours import name_of_machine

T = TypeVar("T")

HERE = "the optimizer's constructor"
ALL_CAME = "all came"
FAILED = "failed"
LATE = "zerox: "
LISTEN_S = 0.05
GIVE_UP_S = 4 * LISTEN_S


class RollCall:
    """One construction over the ranks of a group.

    As a context manager it leaves word of an error that was raised inside, without waiting for other ranks: they read
    it when they come, or in unless_one_fails(). Each rank counts its constructions, and so finds the same one's keys.
    """

    def __init__(self, store: Store | None, rank: int, size: int, timeout: timedelta) -> None:
        """``store``: the group's; None for one rank alone, and if there is none: then ranks learn nothing."""
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.store: Store | None = None
        if store is not None and size > 1:
            with contextlib.suppress(RuntimeError):  # not every store can count; one that is gone fails later anyway
                number = PrefixStore("zerox/constructions", store).add(str(rank), 1)
                self.store = PrefixStore(f"zerox/construction {number}", store)

    def __enter__(self) -> RollCall:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.store is not None and error is not None:
            with contextlib.suppress(RuntimeError):  # a store that is gone must not hide the reason
                reason = f"rank {self.rank} raised {summary_of(error)}"
                self._decide(reason)
                self.store.compare_set(FAILED, "", reason)

    def answer(self, terms: str) -> None:
        """Waits until all ranks have come. ``terms`` must be the same for their groups to match.

        ValueError if a rank raised inside its roll call or came with other terms, RuntimeError naming those that did
        not come within the timeout.
        """
        if self.store is None:
            return
        self.store.set(f"rank {self.rank}", f"{name_of_machine()} {os.getpid()}")
        first_rank, _, first = self.store.compare_set("terms", "", f"{self.rank} {terms}").decode().partition(" ")
        if first != terms:
            self._decide(f"ranks must agree: rank {first_rank} has {first}; rank {self.rank} has {terms}")
        elif self.store.add("count", 1) == self.size:
            self._decide(ALL_CAME)
        patience = say_after()
        says = timedelta() < patience < self.timeout
        try:
            if not (says and self._decide_within(patience)):
                self.store.wait(["decision"], self.timeout - patience if says else self.timeout)
        except RuntimeError:
            missing, seconds = self._missing, self.timeout.total_seconds()
            self._decide(f"{LATE}ranks {missing} did not come to the optimizer's constructor within {seconds:g} s")
        decision = self.store.get("decision").decode()
        if decision.startswith(LATE):
            raise RuntimeError(decision)
        if decision != ALL_CAME:
            raise ValueError(f"zerox: {decision}")

    def process_of_parent(self) -> list[int]:
        """By rank, once all have come: that of the rank which is this process's parent, as multiprocessing has them; 0
        for all others."""
        parent, here = parent_process(), name_of_machine()
        if self.store is None or parent is None:
            return [0] * self.size
        told = [self.store.get(f"rank {rank}").decode() for rank in range(self.size)]
        return [parent.pid or 0 if each == f"{here} {parent.pid}" else 0 for each in told]

    def unless_one_fails(self, connect: Callable[[], T], give_up: Callable[[], None]) -> T:
        """Returns ``connect()``, which waits for all ranks. RuntimeError at once if one of them raised instead.

        It runs on a thread of its own while this one listens: nothing ends gloo's wait for a rank that won't connect.
        ``give_up()`` ends its waits for the store, which it must not keep to itself: see PolledStore. Python may be
        about to exit, and a thread that calls it then aborts the process.
        """
        if self.store is None:
            return connect()
        made: Future[T] = Future()

        def run() -> None:
            try:
                made.set_result(connect())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=run, name="zerox connect", daemon=True).start()
        began, patience_s = time.monotonic(), say_after().total_seconds()
        try:
            while not wait([made], LISTEN_S).done:
                if 0 < patience_s <= time.monotonic() - began:
                    self._say(patience_s, "all ranks to connect: does each host's name resolve on the others?")
                    patience_s = 0.0  # it is said once
                if self.store.check([FAILED]):
                    raise RuntimeError(self.store.get(FAILED).decode())
        finally:
            give_up()
            wait([made], GIVE_UP_S)  # an interrupted Thread.join() would take the thread for ended
        return made.result()

    @property
    def _missing(self) -> list[int]:
        assert self.store is not None
        return [rank for rank in range(self.size) if not self.store.check([f"rank {rank}"])]

    def _decide_within(self, patience: timedelta) -> bool:
        """Whether all came that soon; says whom this rank waits for if they did not."""
        assert self.store is not None
        try:
            self.store.wait(["decision"], patience)
        except RuntimeError:
            self._say(patience.total_seconds(), f"ranks {self._missing} to come")
            return False
        return True

    def _say(self, waited_s: float, whom: str) -> None:
        C.say_wait(rank=self.rank, doing=HERE, whom=whom, waited=timedelta(seconds=waited_s), timeout=self.timeout)

    def _decide(self, text: str) -> None:
        """The first decision stands."""
        assert self.store is not None
        self.store.compare_set("decision", "", text)


def summary_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
