"""Frameworks wrap an optimizer in an object whose class inherits from its own: a call on either is one on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optimizer.wrapper_cases import CASES, train
from tests.ranks import run_ranks


class Delegating:
    """As Lightning's and Fabric's: what it lacks is looked up in the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Delegating", (Delegating, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Copying:
    """As older ones of Fabric: it has the optimizer's attributes as they were when it was made."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = dict(optimizer.__dict__)
        self._optimizer = optimizer
        self.__class__ = type("Copying", (Copying, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: optimizer,
    "delegating": Delegating,
    "copying": Copying,
}


def train_on(rank: int, _: int, case: Callable[..., None], wrap: str) -> list[Tensor]:
    return train(rank, case, WRAPPERS[wrap])


@pytest.mark.parametrize("wrap", ["delegating", "copying"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_calls_on_a_wrapper_are_calls_on_its_optimizer(case: Callable[..., None], wrap: str) -> None:
    for own, others in zip(run_ranks(train_on, 2, case, "none"), run_ranks(train_on, 2, case, wrap), strict=True):
        assert len(own) == len(others)
        assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))
