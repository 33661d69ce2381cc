"""Functions of one test file that run in the same processes, which take longer to start than most of them to run."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.ranks import Once

OnRank = Callable[[int], Any]  # takes the rank


class OnRanks:
    """``on_ranks = OnRanks(__name__, 2)``, which is its name in the file, is the decorator of these functions."""

    def __init__(self, module: str, *world_sizes: int) -> None:
        self.functions: dict[str, OnRank] = {}
        self.asked = [Once(_run_all, world_size, module) for world_size in world_sizes]

    def __call__(self, function: OnRank) -> OnRank:
        self.functions[function.__name__] = function
        return function

    def answers(self, name: str) -> list[Any]:
        """What came of one, by rank, for each world size: its traceback if it raised."""
        return [found[name] for ask in self.asked for found in ask()]


def _run_all(rank: int, world_size: int, module: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, function in importlib.import_module(module).on_ranks.functions.items():
        torch.manual_seed(rank)
        try:
            found[name] = function(rank)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
