"""The optimizer's state in torch's form: state_dict(), load_state_dict() and full_state_dict()."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerox._C import SyncPoint
from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket, start_states
from zerox.memory.flat import dense_strides
from zerox.memory.row_table import RowTable
from zerox.memory.torch_optimizer import TorchOptimizer
from zerox.optimizer.core import Core, Face
from zerox.ranks.calls import named, warn_caller
from zerox.ranks.dtensors import cuts_of
from zerox.rules.rule import MASK
from zerox.sliced_tensor import SlicedTensor
from zerox.state.begun_state import BegunState
from zerox.state.dcp_request import Request, dcp_request
from zerox.state.failed_load import refusal_after, text_for_ranks
from zerox.state.full_state import full_state, in_full, show_in_group
from zerox.state.own_state import as_loaded, check_own, places_of, warn_of_dcp, warn_of_others, with_own
from zerox.state.pulled_state import GONE, NOTHING, PulledState
from zerox.state.pulled_tensor import PulledTensor
from zerox.state.row_state import check_rows_given, fill_rows, whole_state
from zerox.state.shown_state import ShownState
from zerox.state.sliced_state import sliced_state, whole_form
from zerox.state.state_changes import open_window
from zerox.state.state_dict import (
    Uncast,
    check_groups,
    check_state,
    fill_state,
    groups_to_take,
    pack_with,
    say_rounded,
    state_uncast,
)
from zerox.state.written_state import Written, agree_on_written, find_written

# Where nobody reads state: to look for what was written takes time.
OF_GRADIENTS = (SyncPoint.CLIP, SyncPoint.CLIP_TOGETHER, SyncPoint.CLIP_VALUE, SyncPoint.MEAN_OVER, SyncPoint.UNSCALE)


@dataclass(frozen=True)
class Consolidated:
    """The whole state, as it was when this rank's ``steps`` were these."""

    state: dict[int, dict[str, Any]]
    steps: Sequence[Tensor]

    def is_of(self, buckets: Sequence[Bucket]) -> bool:
        """False after a step, also if a CUDA graph, which calls nothing of ours, made it."""
        return all(torch.equal(then, bucket.steps) for then, bucket in zip(self.steps, buckets, strict=True))


class OptimizerState:
    """Each rank has the state of its own shards, in buckets. Phases: "failed load" and "written state"."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.groups = core.groups
        self.consolidated: Consolidated | None = None
        self.failed = ""  # why this rank's last load_state_dict() raised, with several ranks
        self.half_loaded = ""  # why parameters are not to be trained or saved: no state_dict() has these
        self.shows = ShownState()
        self.pulls = PulledState(core, self.shows, open_window(core.ranks))
        core.loading = self
        core.groups.optimizer.register_state_dict_post_hook(self._shared, prepend=True)
        core.phases.before_sync("failed load", self._refuse_failed)
        core.phases.before_sync("written state", self._look_at_written)
        core.phases.adopting("written state", self._agree_on_written)

    # ---- what the rest of an optimizer tells it

    def note_changes(self) -> None:
        """What was consolidated is of the state before."""
        self.consolidated = None

    def note_loaded(self) -> None:
        """What is in the buckets was loaded."""
        self.failed = ""
        self.pulls.end_step()  # one that raised
        self.note_changes()
        self.core.calls.record.has_looked = False
        if not self.shows.is_as_shown(self.groups.state):  # what was written before doesn't count any more
            self._publish_state()
        self.shows.written.clear()
        self.core.update.note_loaded(self.groups.param_groups)

    def start_states(self, capturing: bool = False) -> None:
        """A group's option that asks for state may be turned on later: torch makes it at the next step too."""
        if start_states(self.core.buckets, self.groups.param_groups, capturing):
            self._publish_state()

    def take_adopted(self, buckets: Sequence[Bucket], tables: Sequence[RowTable]) -> None:
        """Takes state that was loaded for parameters before they had these. ValueError if it misfits."""
        params = [m.param for bucket in buckets for m in bucket.members] + [table.param for table in tables]
        state = self.groups.state
        given = {param: Uncast(state[param]) for param in params if state.get(param)}
        if given:
            check_state(buckets, given)
            check_rows_given(tables, self.core.ranks, given)
        with self.pulls.of_all:  # new state lies somewhere, too
            if given:
                fill_state(buckets, given)
                say_rounded(dict.fromkeys(fill_rows(tables, given)))
        self._publish_state()

    # ---- the optimizer's calls

    def _shared(self, _: object, packed: dict[str, Any]) -> dict[str, Any]:
        """A state_dict() that says which part of which tensor this rank has."""
        written = self._find_written()
        if written.why_not:
            raise RuntimeError(f"zerox: {written.why_not}")
        with self.pulls.alone() if written.has_changed else NOTHING:
            self._take(written)
        places = places_of(self.groups.param_groups, self.core.calls.own.params)
        packed = pack_with(self._state_to_show(), self.core.buckets, packed, places)
        state = packed["state"]
        for number, pickled in self.pulls.begun().items():
            place = places.get(number, number)
            if any(isinstance(each, PulledTensor) for each in state.get(place, {}).values()):
                state[place] = BegunState(state[place], pickled)
        return packed

    def _state_to_show(self) -> dict[int, Any] | None:
        """State by parameters' numbers; None: that in ``state``. Collective if DCP asks for whole tensors."""
        ranks, request = self.core.ranks, dcp_request()
        if self.core.tables and request is not None and ranks.size > 1:
            raise NotImplementedError(
                f"zerox: torch.distributed.checkpoint does not know tables, as {self.core.tables[0].member.quoted} of "
                "a param group with sparse=True: use zerox.save() and zerox.load(), or full_state_dict()"
            )
        if self.core.calls.own.params and request not in (None, Request.FILLED_FROM_WHOLE) and ranks.size > 1:
            warn_of_dcp(self.core.calls.own.params)
        if request in (Request.WHOLE, Request.WHOLE_ON_RANK_0):
            return self._state_for_dcp(request)
        if request is Request.FILLED_FROM_WHOLE:
            return {m.number: state for b in self.core.buckets for m, state in sliced_state(b, in_full(b))}
        if request is None and self.consolidated is not None:
            consolidated, self.consolidated = self.consolidated, None
            if consolidated.is_of(self.core.buckets):
                return consolidated.state
        if request is None and self.pulls.is_complete:
            self._say_whose(self.core.ranks.rank)
            return {member.number: state for member, state in self.pulls.shown()}
        if self._is_whole_here:
            return self._with_masks() if any(bucket.mask for bucket in self.core.buckets) else None
        return {member.number: state for bucket in self.core.buckets for member, state in whole_form(bucket)}

    @named("torch.distributed.checkpoint's getters of state with full_state_dict=True")
    def _state_for_dcp(self, request: Request) -> dict[int, dict[str, Any]]:
        self.core.sync(SyncPoint.FULL_STATE)
        if request is Request.WHOLE:
            return full_state(self.core.buckets, self.core.grads.subgroups, None, self.core.ranks.device)
        self._say_whose(0)
        return full_state(self.core.buckets, self.core.grads.subgroups, keeps=self.core.grads.model.is_first)

    def load(self, state_dict: dict[str, Any]) -> None:
        optimizer, version = self.groups.optimizer, self.pulls.version
        try:
            with state_uncast(optimizer):
                TorchOptimizer.load_state_dict(optimizer, state_dict)
        except Exception as error:
            if self.core.ranks.size > 1:
                self.failed = text_for_ranks(error)
                self.pulls.break_off(version)
            raise

    def full_state_dict(self, to: int) -> dict[str, Any]:
        """Collective."""
        state = self._full_state(to)
        is_here = self.core.ranks.rank == to and self.core.grads.model.is_first
        if self.core.calls.own.params:
            state = with_own(state, self.groups.param_groups, self.core.calls.own.params, self.groups.state)
        return {"state": state, "param_groups": self._pack_groups()} if is_here else {}

    def consolidate(self, to: int) -> None:
        """Collective."""
        self.consolidated = None
        state = self._full_state(to)
        if self.core.ranks.rank == to and self.core.grads.model.is_first and not self._is_whole_here:
            self.consolidated = Consolidated(state, [bucket.steps.clone() for bucket in self.core.buckets])

    def take(self, loaded: dict[str, Any]) -> None:
        """torch's load_state_dict() calls this between its own checks and the post-hooks: see Note [Loading state]."""
        core, groups, state = self.core, self.groups.param_groups, loaded["state"]
        check_groups(core.rules, groups, loaded["param_groups"])
        check_own(core.calls.own.params, state)
        check_state(core.buckets, state)
        check_rows_given(core.tables, core.ranks, state)
        # In place: wrappers of frameworks have this list too.
        groups[:] = groups_to_take(core.rules, groups, loaded["param_groups"], self.groups.optimizer.defaults)
        with self.pulls.load:
            self.start_states()
            fill_state(core.buckets, state)
            say_rounded(dict.fromkeys(fill_rows(core.tables, state)))
        self.note_loaded()
        self._keep_waiting(state)

    # ---- phases

    def _refuse_failed(self, visit: Visit) -> None:
        if failed := self.half_loaded or self.failed:
            visit.refusal = visit.refusal or refusal_after(failed, visit.sync_point)

    def _look_at_written(self, visit: Visit) -> None:
        if not visit.refusal and visit.sync_point not in OF_GRADIENTS:
            written = self._find_written()
            visit.refusal = written.why_not
            if not written.parts and not written.why_not:
                self._take(written)  # what users keep there, and nobody else minds
        visit.has_news = visit.has_news or bool(self.shows.written)

    def _agree_on_written(self, _: Visit) -> None:
        """RuntimeError on all ranks unless those that have a parameter's state wrote it together. Collective."""
        core, written = self.core, self._find_written()
        agree_on_written(self.shows, written.why_not, core.buckets, core.tables, core.grads.subgroups)
        # Until here other ranks may read what this one has: a loop over the state reads and writes.
        with self.pulls.load:  # as there, nobody minds any more what a rank took in before, alone
            self._take(written)

    # ---- inside

    @property
    def _is_whole_here(self) -> bool:
        """Whether this rank's state is that of whole parameters."""
        return self.core.ranks.size == 1 and not any(cuts_of(m.param) for b in self.core.buckets for m in b.members)

    def _with_masks(self) -> dict[int, dict[str, Any]]:
        """State by parameters' numbers, on one rank, with masks."""
        kept, members = self.groups.state, [member for bucket in self.core.buckets for member in bucket.members]
        shown = {member.number: dict(kept[member.param]) for member in members if member.param in kept}
        for bucket in self.core.buckets:
            for member, state in sliced_state(bucket, [s for s in bucket.shown_state() if s.spec == MASK]):
                if MASK.key in state:
                    shown[member.number][MASK.key] = state[MASK.key].own.as_strided(
                        member.local.shape, dense_strides(member.local)
                    )
        return shown

    def _full_state(self, to: int) -> dict[int, dict[str, Any]]:
        core, groups, kept = self.core, self.groups.param_groups, self.groups.state
        ranks, is_first = core.ranks, core.grads.model.is_first
        if to not in range(ranks.size):
            raise ValueError(f"to must be one of the optimizer's ranks, 0 to {ranks.size - 1}, got {to!r}")
        core.sync(SyncPoint.FULL_STATE)
        self.learn_kinds()
        self._say_whose(to)
        found = full_state(core.buckets, core.grads.subgroups, to, keeps=is_first)
        for bucket in core.buckets:
            for member in bucket.members if found else ():
                if shown := show_in_group(bucket.rule, groups[member.group], found.pop(member.number)):
                    found[member.number] = shown
        for table in core.tables:
            if state := whole_state(table, ranks, to):
                found[table.member.number] = state
        if ranks.rank == to and is_first:
            waiting = {m.number: kept[m.param] for m in core.frozen if kept.get(m.param)}
            found |= {number: state for number, state in waiting.items() if not _has_slices(state)}
        return dict(sorted(found.items()))

    def _say_whose(self, to: int) -> None:
        ranks = self.core.ranks
        if self.core.calls.own.are_some and ranks.rank == to and ranks.size > 1:
            warn_of_others(to)
        if (others := self.core.grads.subgroups.first_of_others(to)) and ranks.rank == to:
            warn_caller(
                f"zerox: the whole state of rank {to} has its own experts only (param groups with a process_group). "
                f"full_state_dict(to=RANK) for the ranks {others} has the others', and zerox.save() has those of all",
            )

    def learn_kinds(self) -> None:
        """On all ranks in this order: a class's new kinds of state are learned here."""
        for group in self.groups.param_groups:
            self.core.rules.of(group).late(group)

    def _pack_groups(self) -> Any:
        """Param groups as in state_dict(), which shows no state then."""
        kept, self.consolidated = self.consolidated, Consolidated({}, [bucket.steps for bucket in self.core.buckets])
        groups = self.groups.optimizer.state_dict()["param_groups"]
        self.consolidated = kept
        return groups

    def _publish_state(self) -> None:
        """Puts state where torch keeps it."""
        self.consolidated = None
        live = partial(_live, weakref.ref(self.pulls)) if self.pulls.can_be_complete else None
        self.shows.show(self.groups.state, self.core.buckets, self.core.tables, self.core.ranks, live)
        self.groups.state = self.shows.state

    def _find_written(self) -> Written:
        """What users wrote into ``state``."""
        core, state = self.core, self.groups.state
        if self.shows.is_as_shown(state):
            return Written()
        return find_written(self.shows, state, core.buckets, core.tables, self.groups.param_groups)

    def _take(self, written: Written) -> None:
        """It becomes this rank's."""
        if self.shows.is_as_shown(self.groups.state):
            return
        written.take()
        self.note_changes()
        self._publish_state()

    def _keep_waiting(self, loaded: Mapping[Any, Any]) -> None:
        """State of parameters that are not trained yet stands in ``state``, as in torch, until they are."""
        state, own, buckets = self.groups.state, self.core.calls.own.params, self.core.buckets
        known = {id(m.param) for bucket in buckets for m in bucket.members} | {id(t.param) for t in self.core.tables}
        others = {p: given.state for p, given in loaded.items() if isinstance(p, Tensor) and id(p) not in known}
        for param in [p for p in state if isinstance(p, Tensor) and id(p) not in known]:
            del state[param]
        of_own = {param: as_loaded(param, given) for param, given in others.items() if given and id(param) in own}
        kept = {param: {key: _kept(value) for key, value in given.items()} for param, given in others.items() if given}
        state.update(kept | of_own)
        self.shows.note_seen()
        if frozen := [m.quoted for m in self.core.frozen if others.get(m.param)]:
            warn_caller(
                f"zerox: state was loaded for parameters that are frozen, as {frozen[0]}: until they are trained "
                "zerox.save() does not have it, and full_state_dict() only if it was loaded whole",
            )


def _live(to_pulls: weakref.ref[PulledState], index: int, slot: int, row: int) -> dict[str, Any]:
    pulls = to_pulls()
    if pulls is None:
        raise RuntimeError(GONE)
    return pulls.live(index, slot, row)


def _kept(value: Any) -> Any:
    """Of another optimizer's state, for as long as it has to wait."""
    return value.share() if isinstance(value, PulledTensor) else copy.deepcopy(value)


def _has_slices(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, SlicedTensor) for value in state.values())


class OptimizerStateFace(Face):
    _state: OptimizerState

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's own ``state_dict()``, or whole tensors: full_state_dict()'s, or torch.optim's.

        In place, and not collective; load the model first. As in torch, state that isn't given starts anew, and that of
        parameters which are frozen, or which the next step() takes in, waits in ``state`` until then. Warns of it, and
        of state that this optimizer's ``state_dtype`` and ``master_weights`` round. Raises ValueError, with nothing
        changed, for groups or sizes that don't fit, and for another rank's share. With several ranks, what it raises is
        remembered until this rank has loaded a state: see :mod:`zerox.state.failed_load`.
        """
        self._state.load(state_dict)

    @named("full_state_dict()")
    @torch.no_grad()
    def full_state_dict(self, to: int = 0) -> dict[str, Any]:
        """On rank ``to``, a dict on the CPU for the class in torch.optim to load; elsewhere ``{}``. Collective.

        It has whole tensors in the parameters' shapes, float32 (float64 beside float64 parameters), and in addition
        "master", float32, of parameters that have one. Above this, rank ``to`` needs memory for one bucket of one of
        these. Raises ValueError for a rank that the optimizer's group does not have. DTensors are whole too: of the
        ranks along their axes the first returns the dict. Of experts (param groups with a ``process_group``) it has
        those that rank ``to`` has, with a warning that names ranks with others.
        """
        return self._state.full_state_dict(to)

    @named("consolidate_state_dict()")
    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Makes the next ``state_dict()`` on rank ``to`` return that of ``full_state_dict()``, once. Collective.

        As in torch's ZeroRedundancyOptimizer, for code that saves the ``state_dict()`` of one rank. The other ranks'
        ``state_dict()`` stays as it is, and so does this one's if anything changes the state meanwhile.
        """
        self._state.consolidate(to)

    def __setstate__(self, loaded: dict[str, Any]) -> None:
        self._state.take(loaded)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: its state is spread over ranks, and its hooks belong "
            "to the parameters. Use state_dict()"
        )
