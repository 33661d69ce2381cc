"""What the user called, in errors, and in what a rank says when it has waited long for others."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from zerox import _C as C
from zerox.ranks.process_group import time_of

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "ZEROX_SAY_WAIT_S"
SAY_AFTER_S = 60.0


def named(what: str, per_batch: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Of a function in which ranks synchronize: errors and long waits inside name ``what``, unless another one called
    it.

    The outermost name is of what the user called. ``per_batch``: training loops do it for each batch, so a rank that
    has fewer batches may be why another waits.
    """

    def with_name(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with C.Doing(what, per_batch):
                return function(*args, **kwargs)

        return called

    return with_name


def warn_caller(text: str) -> None:
    """Warns at the line of the user's that called zerox, however many calls of ours and torch's lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("zerox", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def say_after() -> timedelta:
    """After how long a rank that waits says so; 0: never. ValueError for a variable that is no such number."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else SAY_AFTER_S
        found = timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        seconds, found = -1.0, timedelta()
    if not seconds >= 0.0:
        raise ValueError(f"{VARIABLE} must be a number of seconds, or 0 for never, got '{text}'")
    return found


def waiting(group: dist.ProcessGroup, whom: str = "the other ranks") -> C.LongWait:
    """Around a wait of this thread for ranks of ``group`` that no FailureDetector knows of: says so if it is long."""
    return C.LongWait(rank=dist.get_rank(), whom=whom, timeout=time_of(group), say_after=say_after())
