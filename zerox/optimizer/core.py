"""What the parts of an optimizer have together, and how its ranks synchronize.

Note [Parts of an optimizer]
The class that users call has public methods only, each of which hands over to a part: its state, its mean gradient,
its param groups, join(). A part is an object that holds the core, and the core has what several of them use.

Wrappers of frameworks are why nothing of it lies in attributes of the optimizer that change. Lightning's wrapper
inherits from the optimizer's class, and looks up in the optimizer what it does not find in itself; Fabric's has a copy
of the optimizer's ``__dict__``. A method that is called on either would set attributes of the wrapper, which step()
would never see. Both find the parts, which the constructor makes once.

No part holds the optimizer: it has to go when its user lets go of it, whose parameters then have no hooks any more. So
groups.py has a weak reference, and the core is told when the optimizer goes, since it and its parts hold each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from zerox import _C as C
from zerox._C import SyncPoint, SyncResult
from zerox.calls.grad_calls import GradCalls
from zerox.calls.grad_phases import GradPhases
from zerox.calls.phases import Phases, Visit
from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket, Member
from zerox.memory.row_table import RowTable
from zerox.memory.torch_optimizer import TorchOptimizer
from zerox.optimizer.groups import Groups
from zerox.options import OptimizerOptions
from zerox.params.overlap_gather import GatherOverlap
from zerox.params.params import ParamGather
from zerox.params.unwrapped_params import OwnParams, Shown
from zerox.ranks.group import Ranks
from zerox.ranks.model_axes import ModelAxes
from zerox.residency.residency import Residency, make_gather
from zerox.residency.written_alone import come, take_refusal
from zerox.rules.of_groups import Rules
from zerox.update.update import Update


class Pulls(Protocol):
    """What ranks read of each other's state: state/pulled_state.py. To be entered around what changes it, where no rank
    waits for another one: ``of_all`` if it changes on all ranks, ``step`` and ``load`` of step() and of loads.
    ``is_complete``: whether all of it can be read. Between begin_step() and end_step() parameters change."""

    of_all: AbstractContextManager[None]
    load: AbstractContextManager[None]

    @property
    def is_complete(self) -> bool: ...
    def step(self, capturing: bool) -> AbstractContextManager[None]: ...
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...


class Loading(Protocol):
    """The state of an optimizer, for what changes it: state/optimizer_state.py. ``failed``: what there is to say of
    this rank's last load_state_dict(), if that raised. ``half_loaded``: the same of its parameters, if a load of these
    came to no end."""

    failed: str
    half_loaded: str

    @property
    def pulls(self) -> Pulls: ...
    @property
    def shows(self) -> Shown: ...
    def start_states(self, capturing: bool = False) -> None:
        """Makes the state that the options of the param groups ask for."""

    def note_loaded(self) -> None:
        """What is in the buckets was loaded."""

    def note_changes(self) -> None:
        """What was consolidated is of the state before."""

    def take_adopted(self, buckets: Sequence[Bucket], tables: Sequence[RowTable]) -> None:
        """There are these new ones."""


class InJoin(Protocol):
    """What join() has of an optimizer: join.py. ``divide``: of the join() that it is inside; None: outside.
    ``is_notified``: torch's Join knows of this step."""

    divide: str | None
    is_notified: bool

    def take_options(self, result: SyncResult, follows: bool) -> None:
        """Where ranks' options differ, a follower takes those of the others. Collective."""


class Core:
    """What tests, tools and zerox.checkpoint see of an optimizer as ``optimizer.inside``: no promise, it may change
    with any version. ``sparsity``: its zerox.Sparsity, if it has one.

    Parts set ``joining`` and ``loading``, and register phases: see Note [Parts of an optimizer].
    """

    joining: InJoin
    loading: Loading

    def __init__(
        self, ranks: Ranks, groups: Groups, own: OwnParams, model: ModelAxes, make_update: type[Update]
    ) -> None:
        options = groups.options
        self.ranks = ranks
        self.groups = groups
        self.buckets: list[Bucket] = []
        self.grads = Grads(
            ranks,
            options.stage_plan,
            options.reduce_dtype,
            options.capturable,
            divides=any(divisor is not None for divisor in groups.divisors()),
            model=model,
        )
        self.grads.subgroups.take(groups.param_groups)
        self.gather: ParamGather | Residency = make_gather(self.grads.manager, ranks, options)
        self.overlap: GatherOverlap | None = None
        self.sparsity: Any = None
        self.phases = Phases()
        scale = GradScale(self.grads.manager, ranks.device, keeps_place=options.capturable)
        self.calls = GradCalls(self.grads, scale, self.buckets, own, self.gather.shards_params)
        GradPhases(self.calls, self.phases)
        self.calls.answers.sync = weakref.WeakMethod(self.sync)
        self.update = make_update(groups.rules, self.buckets, self.grads, scale, options.capturable)

    def sync(self, sync_point: SyncPoint, arguments: Sequence[float] = (), refusal: str = "") -> SyncResult:
        """Waits for everything on its way. Collective. ``sync_point`` is named to ranks that can't follow there; with a
        ``refusal``, RuntimeError on all ranks."""
        self.ranks.check_here()
        if not self.grads.no_sync_depth:  # else it raises
            come(self.ranks.group_if_any)
            refusal = take_refusal(self.gather) or refusal
        visit = Visit(sync_point, arguments, refusal, sync_point is SyncPoint.FOLLOW)
        for phase in self.phases.before.values():
            phase(visit)
        told, news = (sync_point, arguments, visit.options, visit.params), int(visit.has_news)
        visit.result = self.grads.sync(*told, news, visit.refusal)
        if visit.result.adopts:
            for phase in self.phases.adopt.values():
                phase(visit)
            visit.result = self.grads.sync(*told, refusal=self.calls.pack_rows(sync_point))
        for phase in self.phases.after.values():
            phase(visit)
        return visit.result

    def let_go(self) -> None:
        """The optimizer is gone: nothing meets any more, and parts go with whoever has them."""
        self.phases = Phases()
        del self.joining, self.loading

    # ---- what tests, tools and parts look at

    @property
    def rules(self) -> Rules:
        return self.groups.rules

    @property
    def options(self) -> OptimizerOptions:
        return self.groups.options

    @property
    def model_given(self) -> Any:
        """To the constructor, if it lives."""
        return self.groups.model()

    @property
    def frozen(self) -> list[Member]:
        """Parameters that have no bucket."""
        return self.groups.frozen

    @property
    def manager(self) -> C.BucketManager:
        return self.grads.manager

    @property
    def tables(self) -> list[RowTable]:
        """Parameters whose gradients are rows."""
        return self.calls.row_grads.tables

    @property
    def members(self) -> list[Member]:
        """All parameters, frozen ones too."""
        trained = [member for bucket in self.buckets for member in bucket.members]
        return [*trained, *(table.member for table in self.tables), *self.frozen]

    @property
    def waited_ns(self) -> int:
        """How long threads of this rank have waited for ranks to exchange gradients and parameters, so far."""
        residents = self._residents()
        fetched = 0 if residents is None else residents.counts.waited_ns
        return fetched + sum(
            part.waited_ns for part in (self.manager.synchronizer, self.manager.flights, self.manager.params)
        )

    def take_most_resident_bytes(self) -> int:
        """The most bytes of parameters that were whole here at a time since the last call."""
        if (residents := self._residents()) is not None:
            return residents.take_most_bytes()
        return sum(bucket.buffer.flat.nbytes for bucket in self.buckets) + sum(m.param.nbytes for m in self.frozen)

    def _residents(self) -> C.Residency | None:
        """None if parameters are whole."""
        is_sharded = isinstance(self.gather, Residency) and self.gather.residents.has_shards
        return self.gather.residents if is_sharded else None  # type: ignore[union-attr]


class Face(TorchOptimizer):
    """An optimizer as its users have it: see Note [Parts of an optimizer]."""

    _core: Core

    @property
    def inside(self) -> Core:
        """For tests, tools and zerox.checkpoint. Not a promise: it may change with any version."""
        return self._core
