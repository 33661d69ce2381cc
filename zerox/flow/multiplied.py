"""Placeholders in p.grad that were multiplied by a number, as the schedules of torch.distributed.pipelining do.

What a placeholder stands for has left for its owner. So the next call of the optimizer multiplies the mean, if on every
rank all that were there were multiplied by one number.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from zerox import _C as C
from zerox.flow.placeholder import ShardedGrad

WAY_OUT = (
    "multiply all of them alike, on all ranks and after the last backward of a step, or call scale_grads_(). "
    "A schedule of several pipeline stage modules on a rank runs inside no_sync(), or each module has an optimizer of "
    "its own"
)


@dataclass
class Beginning:
    """``num_launched``: when the first placeholder was multiplied; None: none was."""

    num_launched: int | None = None


class Multiplied:
    """``placeholders``: of all buckets, which are added later. In p.grad they may outlive the manager."""

    def __init__(self, manager: C.BucketManager) -> None:
        self.to_manager = weakref.ref(manager)
        self.placeholders: list[ShardedGrad] = []
        self.beginning = Beginning()
        self.agreed = 1.0  # the factor, once ranks have met

    def add(self, placeholders: Sequence[ShardedGrad]) -> None:
        self.placeholders += placeholders
        for each in placeholders:
            each.on_multiply = partial(_note, self.to_manager, self.beginning)

    @property
    def is_noted(self) -> bool:
        return self.beginning.num_launched is not None

    def common(self) -> tuple[float, str]:
        """By what all were multiplied, and why that can't be told."""
        if not self.is_noted:
            return 1.0, ""
        factors = {each.factor: each for each in self.placeholders if each.is_set}
        if not factors:  # discarded since
            self.forget()
            return 1.0, ""
        if len(factors) > 1:
            said = " and ".join(f"{each.quoted} by {factor:g}" for factor, each in list(factors.items())[:2])
            return 1.0, f"gradients that had left were multiplied, but that of {said}: {WAY_OUT}"
        if _num_launched(self.to_manager) != self.beginning.num_launched:
            return 1.0, f"gradients were added after p.grad, whose gradient had left, was multiplied: {WAY_OUT}"
        return next(iter(factors)), ""

    def take(self) -> float:
        """What is left to multiply by now."""
        factor = self.agreed
        if factor != 1.0:
            self.forget()
        return factor

    def forget(self) -> None:
        if not self.is_noted and self.agreed == 1.0:  # all factors are 1
            return
        self.beginning.num_launched, self.agreed = None, 1.0
        for each in self.placeholders:
            each.factor = 1.0


def _num_launched(to_manager: weakref.ref[C.BucketManager]) -> int:
    manager = to_manager()
    return 0 if manager is None else manager.flights.num_launched


def _note(to_manager: weakref.ref[C.BucketManager], beginning: Beginning) -> None:
    if beginning.num_launched is None:
        beginning.num_launched = _num_launched(to_manager)
