"""What one rank writes of sharded parameters while the others go on, as where rank 0 evaluates with an average of the
weights: by the time that ranks synchronize it has the values of all again. See Note [Shards are pulled] in
csrc/residency/peer_shards.h."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zerox import _C as C
from zerox import _torch
from zerox.params.compiled_regions import keep_from_dynamo
from zerox.ranks.calls import warn_caller

if TYPE_CHECKING:
    from zerox.residency.residency import Residency

NOT_PUT_BACK = (
    "parameters of {1} were written on rank {0} and not on all ranks, and did not get back the values that all have: "
    "what was written is taken back. Write on all ranks, or inside optimizer.whole(), or into copy.deepcopy(model)"
)


def _caller() -> tuple[int, int]:
    return os.getpid(), get_ident()


@dataclass
class Watched:
    """``ranks``: all that have shards. ``not_put_back``: what is to be said where they synchronize. ``caller``: of
    the optimizer, its process and thread."""

    ranks: frozenset[int]
    not_put_back: str = ""
    caller: tuple[int, int] = field(default_factory=_caller)


_all: WeakKeyDictionary[Residency, Watched] = WeakKeyDictionary()
_ranks: WeakKeyDictionary[dist.ProcessGroup, frozenset[int]] = WeakKeyDictionary()


def watch(sharded: Residency, group: dist.ProcessGroup) -> None:
    _all[sharded] = Watched(_ranks_of(group))


def come(group: dist.ProcessGroup | None) -> None:
    """To be called before a wait of this group's ranks for each other, on all of them or on none.

    Whoever waits for a write of this rank goes on, whatever optimizer the parameters belong to; and what this one has
    written alone is taken back.
    """
    if not _all or group is None:
        return
    ranks = _ranks_of(group)
    for sharded in _with_shards():
        if _all[sharded].ranks == ranks:
            _come(sharded)


def come_in_script(group: dist.ProcessGroup) -> None:
    """The same before a collective call of the script's own, as ``dist.barrier()``, of these ranks and maybe others.

    Those of other threads don't count: one that saves a checkpoint comes to them at other moments on other ranks.
    """
    if group in _torch.listed_groups():  # else it is ours
        ranks, caller = _ranks_of(group), _caller()
        for sharded in _with_shards():
            if _all[sharded].ranks <= ranks and _all[sharded].caller == caller:
                _come(sharded)


def _come(sharded: Residency) -> None:
    sharded.residents.come()
    if sharded.under_way is None and not sharded.depth:
        take_back(sharded)


def take_back(sharded: Residency) -> None:
    if differing := sharded.residents.take_back():
        names = ", ".join(sharded.all[index].name for index in differing)
        watched = _all[sharded]
        watched.not_put_back = watched.not_put_back or NOT_PUT_BACK.format(sharded.ranks.rank, names)
        warn_caller(f"zerox: {watched.not_put_back}")  # the script may end before ranks synchronize


def take_refusal(gather: object) -> str:
    """Why ranks can't synchronize: it was not put back; else empty."""
    watched = _all.get(gather)  # type: ignore[call-overload]
    if watched is None:
        return ""
    why, watched.not_put_back = watched.not_put_back, ""
    return str(why)


def _with_shards() -> list[Residency]:
    every = [reference() for reference in _all.keyrefs()]  # at once: another thread may build an optimizer
    return [each for each in every if each is not None and each.residents.has_shards]


def _ranks_of(group: dist.ProcessGroup) -> frozenset[int]:
    """Of a group that was made by hand, which torch knows no ranks of, a number of its own."""
    if group not in _ranks:
        try:
            _ranks[group] = frozenset(dist.get_process_group_ranks(group))
        except KeyError:
            _ranks[group] = frozenset([-id(group)])
    return _ranks[group]


keep_from_dynamo(come_in_script)
C.set_before_collective(come_in_script)
