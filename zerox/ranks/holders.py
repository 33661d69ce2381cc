"""Who holds which parameters: the living optimizers of zerox, and what averages gradients that none of them holds."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Holder(NamedTuple):
    """An optimizer, which nobody here keeps alive (ranks may be threads), and its parameters by id, frozen ones too."""

    to_optimizer: weakref.ref[Any]
    params: set[int]


class Averages(Protocol):
    """What averages gradients that no optimizer holds, ``sent``, by id: see Note [Left-over gradients]."""

    sent: tuple[int, ...]

    def let_go(self, taken: set[int]) -> None:
        """Of parameters, by id, that an optimizer takes."""


averaging: weakref.WeakSet[Averages] = weakref.WeakSet()
_holders: dict[int, Holder] = {}  # by the optimizer's id
_num_changes = [0]


def note_change() -> None:
    """Other parameters than before are in optimizers, or other modules wrapped."""
    _num_changes[0] += 1


def num_changes() -> int:
    return _num_changes[0]


def note_held(optimizer: object, params: Iterable[Tensor]) -> None:
    """An optimizer takes these."""
    taken = {id(param) for param in params}
    if id(optimizer) not in _holders:
        weakref.finalize(optimizer, _forget, id(optimizer)).atexit = False
        _holders[id(optimizer)] = Holder(weakref.ref(optimizer), set())
    _holders[id(optimizer)].params.update(taken)
    note_change()
    for each in list(averaging):
        each.let_go(taken)


def _forget(optimizer: int) -> None:
    _holders.pop(optimizer, None)
    note_change()


def find_held() -> set[int]:
    """By id, the parameters of all optimizers."""
    return set().union(*(each.params for each in list(_holders.values())))


def holders_of(params: Collection[int]) -> list[Any]:
    """The optimizers that hold some of these."""
    found = [each.to_optimizer() for each in list(_holders.values()) if not each.params.isdisjoint(params)]
    return [each for each in found if each is not None]
