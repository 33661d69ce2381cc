"""The state of one parameter, of a class that keeps none of some before a first update."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any


class BegunState(dict[str, Any]):
    """All that its class may keep, as every rank shows it: which of it there is, other ranks know. ``pickled()`` asks
    them, and gives what there is of it, as the class keeps it.

    In a file it is an OrderedDict, which ``torch.load(weights_only=True)`` knows.
    """

    def __init__(
        self, shown: Mapping[str, Any], pickled: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__(shown)
        self.pickled = pickled

    def copy(self) -> BegunState:
        return BegunState(self, self.pickled)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> BegunState:
        return BegunState({key: copy.deepcopy(value, memo) for key, value in self.items()}, self.pickled)

    def __reduce_ex__(self, protocol: object) -> Any:
        there = self if self.pickled is None else self.pickled(self)
        return OrderedDict, (), None, None, iter(there.items())

    def _reduced(self) -> Any:
        return dict, (), None, None, iter(self.items())


ForkingPickler.register(BegunState, BegunState._reduced)  # between processes of one machine nothing is lost
