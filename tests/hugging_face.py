"""Accelerate in processes that serve many tests: each test's ranks look as if torchrun had started them."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState

from tests.ranks import run_ranks

ALONE = 0  # a "world size": one plain process, without torchrun and process group


@functools.cache
def leave_imports_alone() -> None:
    """Once a process. Trainer collects garbage at each start: 0.3 s for what the imports of frameworks have made."""
    gc.collect()
    gc.freeze()


def accelerators_environment(rank: int, world_size: int) -> AbstractContextManager[Any]:
    """What torchrun would set; Accelerate remembers its first answers for the life of a process."""
    leave_imports_alone()
    forget_answers()  # a test of something else may have asked: DataLoaders and callbacks of frameworks do
    told: dict[str, Any] = {}
    if world_size != ALONE:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    stack = ExitStack()
    stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}))
    stack.callback(forget_answers)
    return stack


def forget_answers() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def run_anywhere(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``function(rank, world_size, *args)`` on ranks, or in this process if ``world_size`` is ALONE."""
    return [function(0, ALONE, *args)] if world_size == ALONE else run_ranks(function, world_size, *args)
