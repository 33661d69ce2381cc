"""What happens at a sync point, before it and after it: the phases of a call, in one order on every rank.

Note [Phases of a sync point]
A feature that has something to find out before ranks synchronize, or to do once they have, registers a phase with the
core, by a name that stands in one of the orders below. The orders are the only place that knows of all features. What
one phase leaves for another lies in the Visit. Before the sync point a rank does not know whether the others go on: it
looks, and refuses, and changes nothing that a refusal would have to take back. After it all ranks know the same, so a
phase may be collective if it depends on the result alone. If a rank has news (param groups of the user's, parameters
that train now, state that was written), all adopt it first, and meet once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zerox._C import SyncPoint, SyncResult
from zerox.memory.bucket import Member
from zerox.memory.flat import BufferSlot

BEFORE_SYNC = (
    "notice",  # torch's Join hears of the step before this rank waits for others
    "failed load",  # the first refusal is told, and those that last come first
    "gather",  # parameters are whole before anybody looks where they lie
    "moved",
    "frozen",  # which of them train now; "gradients" asks for their gradients
    "groups",
    "written state",  # goes by the groups, and changes state: only where nothing has refused
    "gradients",
    "moved values",  # are read once nothing refuses
    "join",
    "first look",
    "pulls",  # nobody reads others' state any more, which changes next
)
ADOPTING = (
    "written state",  # ranks agree before buckets are made, which show state anew
    "groups",
    "frozen",
)
AFTER_SYNC = (
    "partial sums",
    "rows",  # made, before the phases below multiply gradients
    "first look",
    "scale",  # is forgotten with its gradients before another is left
    "active ranks",
    "operators",  # what was done to p.grad comes after what divides its mean
    "answers",
    "moved",
)


@dataclass(slots=True)
class Visit:
    """One sync point, as this rank comes to it. ``follows``: it has run out of batches, and learns there what the
    others call. ``refusal``: why it can't go on; empty if it can."""

    sync_point: SyncPoint
    arguments: Sequence[float]
    refusal: str
    follows: bool
    options: float = 0.0  # digests, which ranks compare
    params: float = 0.0
    has_news: bool = False  # ranks have to adopt first
    unfrozen: Sequence[Member] = ()  # they train now, and have no bucket yet
    regrouped: Any = None  # what users made of param groups
    elsewhere: Sequence[BufferSlot] = ()  # parameters that are not where the optimizer laid them, and their values
    values: Sequence[Tensor] = ()
    result: SyncResult = field(init=False)


Phase = Callable[[Visit], None]


class Phases:
    """Those that features have registered: see Note [Phases of a sync point]."""

    def __init__(self) -> None:
        self.before: dict[str, Phase] = {}
        self.adopt: dict[str, Phase] = {}
        self.after: dict[str, Phase] = {}

    def before_sync(self, name: str, phase: Phase) -> None:
        self.before = _with(BEFORE_SYNC, self.before, name, phase)

    def adopting(self, name: str, phase: Phase) -> None:
        self.adopt = _with(ADOPTING, self.adopt, name, phase)

    def after_sync(self, name: str, phase: Phase) -> None:
        self.after = _with(AFTER_SYNC, self.after, name, phase)


def _with(order: Sequence[str], known: dict[str, Phase], name: str, phase: Phase) -> dict[str, Phase]:
    """In this order. AssertionError for a name that does not stand there, or is taken."""
    assert name in order, name
    assert name not in known, name
    found = {**known, name: phase}
    return {each: found[each] for each in order if each in found}
