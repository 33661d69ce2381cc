"""The parts of an optimizer that tests, tools and zerox.checkpoint may look at, beside its public methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zerox._C import BucketManager, Meeting, Outcome
from zerox.flow.grad_calls import GradCalls
from zerox.flow.grads import Grads
from zerox.flow.params import ParamGather
from zerox.flow.residency import Residency
from zerox.flow.update import Update
from zerox.memory.bucket import Bucket, Member
from zerox.memory.row_table import RowTable
from zerox.ranks.group import Ranks
from zerox.rules.of_groups import Rules


class Loading(NamedTuple):
    """``start_states()`` makes the state that the options of the param groups ask for; ``note_loaded()``: what is in
    the buckets was loaded. ``failed``: what there is to say of this rank's last load_state_dict(), if that raised.
    """

    start_states: Callable[[], None]
    note_loaded: Callable[[], None]
    failed: str


class Inside(NamedTuple):
    """``frozen``: parameters that have no bucket. ``buckets``: the optimizer's own list, which grows. ``sparsity``: its
    zerox.Sparsity, if it has one.

    ``settle(meeting)`` waits for everything on its way, and is collective.
    """

    rules: Rules
    buckets: list[Bucket]
    frozen: list[Member]
    ranks: Ranks
    grads: Grads
    gather: ParamGather | Residency
    calls: GradCalls
    update: Update
    sparsity: Any
    settle: Callable[[Meeting], Outcome]
    loading: Loading

    @property
    def manager(self) -> BucketManager:
        return self.grads.manager

    @property
    def waited_ns(self) -> int:
        """How long threads of this rank have waited for ranks to exchange gradients and parameters, so far."""
        fetched = self.gather.residents.counts.waited_ns if isinstance(self.gather, Residency) else 0
        return fetched + sum(
            part.waited_ns for part in (self.manager.settlement, self.manager.flights, self.manager.params)
        )

    def take_most_resident_bytes(self) -> int:
        """The most bytes of parameters that were whole here at a time since the last call."""
        if isinstance(self.gather, Residency):
            return self.gather.residents.take_most_bytes()
        return sum(bucket.buffer.flat.nbytes for bucket in self.buckets) + sum(m.param.nbytes for m in self.frozen)

    @property
    def members(self) -> list[Member]:
        """All parameters, frozen ones too."""
        trained = [member for bucket in self.buckets for member in bucket.members]
        return [*trained, *(table.member for table in self.tables), *self.frozen]

    @property
    def tables(self) -> list[RowTable]:
        return self.calls.row_grads.tables
