"""The end of a rank's script: it stays readable until the others are through, too. See Note [Ranks linger] in
csrc/peers/linger.h."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process, util
from typing import Any

import torch

from zerox import _C as C
from zerox import _torch

CPU = torch.device("cpu")
SAY_AFTER_S = 10.0
WAKE_AFTER_S = 0.5  # ranks that wait for this one; nearly always all end together
SHORTEST_S, LONGEST_S = 0.001, 0.05

_process = 0


def stay_at_end() -> None:
    """Once in each process. multiprocessing calls its finalizers at the end of its children, which atexit does not."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        util.Finalize(None, _end, exitpriority=-1)


def _end() -> None:
    if _process != os.getpid():
        return
    if parent_process() is not None:  # there threads are waited for afterwards, and they may read, or be read
        getattr(threading, "_shutdown", lambda: None)()
    C.Linger.free_no_more()
    if _is_error():  # the others should know at once
        return
    C.Linger.come_no_more()
    lingers = [each for each in C.Linger.all() if not each.has_given_up]
    for each in lingers:
        each.end()
    try:
        with _ended_by_signals():
            _stay(lingers)
    except BaseException:  # Ctrl-C, or what a handler of the user's raises: the rest of the end goes on
        pass


def _is_error() -> bool:
    """Whether an exception ends this process: sys.exit(1) too in one of multiprocessing's, but not in others."""
    inside = sys.exc_info()[1]
    if isinstance(inside, SystemExit):
        return inside.code not in (None, 0)
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return inside is not None or (last is not None and not hasattr(sys, "ps1"))


class Ended(BaseException):
    """Ctrl-C or SIGTERM came."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A handler of the user's may only make a note for a loop that is over."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise Ended

    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(each))]
    before = {each: signal.signal(each, end) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _readers(linger: C.Linger) -> list[int]:
    """The ranks that may read, but for this process's parent, which may wait for the end of its children."""
    parent = parent_process()
    return [rank for rank in linger.readers() if parent is None or linger.processes[rank] != parent.pid]


def _stay(lingers: Sequence[C.Linger]) -> None:
    start, pause, is_woken, is_said = time.monotonic(), SHORTEST_S, False, False
    while lingers := [each for each in lingers if _readers(each)]:
        waited = time.monotonic() - start
        lingers = [each for each in lingers if waited < each.timeout.total_seconds()]
        if waited > WAKE_AFTER_S and not is_woken:
            is_woken = True
            _end_waits(lingers)
        if waited > SAY_AFTER_S and not is_said and lingers:
            is_said = True
            _say(lingers[0])
        time.sleep(pause)
        pause = min(pause * 1.2, LONGEST_S)


def _end_waits(lingers: Sequence[C.Linger]) -> None:
    """Whoever waits for this rank, in zerox or in a collective of the user's, is told, as if the process had ended."""
    for linger in lingers:
        linger.end_waits()
    for group in list(_torch.listed_groups()):
        with suppress(Exception):  # what has none for the CPU
            if _torch.backend_of(group, CPU).name() == "gloo":
                C.close_connections(group)


def _say(linger: C.Linger) -> None:
    readers = _readers(linger)
    if readers:
        whom = " and ".join(f"rank {rank}" for rank in readers[:2]) + (" and others" if len(readers) > 2 else "")
        sys.stderr.write(
            f"zerox: rank {linger.rank} has come to the end of its script, and stays for {whom}, which may read its "
            f"part of parameters or of optimizer state; it ends after {linger.timeout.total_seconds():g} s at the "
            "latest\n"
        )
        sys.stderr.flush()
