"""The optimizer's state in torch's form: state_dict(), load_state_dict() and full_state_dict()."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox._C import Meeting, Outcome
from zerox.memory.bucket import Bucket, Member, start_states
from zerox.memory.flat import dense_strides
from zerox.memory.row_table import RowTable
from zerox.memory.shared import Shared
from zerox.memory.torch_optimizer import TorchOptimizer
from zerox.ranks.calls import named, warn_caller
from zerox.ranks.dtensors import cuts_of
from zerox.ranks.group import Ranks
from zerox.ranks.teams import Teams
from zerox.rules.of_groups import Rules
from zerox.rules.rule import MASK
from zerox.sliced_tensor import SlicedTensor
from zerox.state.dcp_request import Request, dcp_request
from zerox.state.failed_load import refusal_after, told_of
from zerox.state.full_state import full_state, in_full, shown_in_group
from zerox.state.own_state import as_loaded, check_own, places_of, warn_of_dcp, warn_of_others, with_own
from zerox.state.row_state import check_rows_given, fill_rows, whole_state
from zerox.state.shown_state import ShownState
from zerox.state.sliced_state import sliced_state, whole_form
from zerox.state.state_dict import (
    Uncast,
    check_groups,
    check_state,
    fill_state,
    groups_to_take,
    packed_with,
    say_rounded,
    state_uncast,
)
from zerox.state.written_state import agree_on_written, take_written

# Where nobody reads state: to look for what was written takes time.
OF_GRADIENTS = (Meeting.CLIP, Meeting.CLIP_TOGETHER, Meeting.CLIP_VALUE, Meeting.MEAN_OVER, Meeting.UNSCALE)


@dataclass(frozen=True)
class Consolidated:
    """The whole state, as it was when this rank's ``steps`` were these."""

    state: dict[int, dict[str, Any]]
    steps: Sequence[Tensor]

    def is_of(self, buckets: Sequence[Bucket]) -> bool:
        """False after a step, also if a CUDA graph, which calls nothing of ours, made it."""
        return all(torch.equal(then, bucket.steps) for then, bucket in zip(self.steps, buckets, strict=True))


class OptimizerState(TorchOptimizer):
    """The part of an optimizer that is about its state. Each rank has the state of its own shards, in buckets."""

    _rules: Rules
    _buckets: list[Bucket]
    _frozen: Shared[list[Member]]
    _ranks: Ranks | None
    _consolidated = Shared[Consolidated | None](None)
    _failed_load = Shared[str]("")  # why this rank's last load_state_dict() raised, with several ranks
    _shown = Shared[ShownState | None](None)
    _sparsity = Shared[Any](None)  # the zerox.Sparsity that decides on its buckets' masks

    @property
    def _tables(self) -> Sequence[RowTable]:
        """Parameters whose gradients are rows."""
        raise NotImplementedError

    @property
    def _own(self) -> Mapping[int, Tensor]:
        """Parameters that are this rank's own, by id: their state lies in ``state`` only."""
        raise NotImplementedError

    @property
    def _ranks_have_own(self) -> bool:
        """Whether any rank has such parameters."""
        raise NotImplementedError

    @property
    def _teams(self) -> Teams:
        """Who has which parameters."""
        raise NotImplementedError

    def _settle(self, meeting: Meeting, arguments: Sequence[float] = (), refusal: str = "") -> Outcome:
        """Collective: waits for everything on its way. ``meeting`` is named to ranks that can't follow there."""
        raise NotImplementedError

    def _note_state_changes(self) -> None:
        """What was consolidated is of the state before."""
        self._consolidated = None

    def _note_loaded(self) -> None:
        """What is in the buckets was loaded."""
        self._failed_load = ""
        self._note_state_changes()
        if not self._shows.is_as_shown(self.state):  # what was written before doesn't count any more
            self._publish_state()
        self._shows.written.clear()

    def _share_state(self) -> None:
        """From now on state_dict() says which part of which tensor this rank has."""

        def shared(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
            if why := optimizer._take_written():
                raise RuntimeError(f"zerox: {why}")
            places = places_of(optimizer.param_groups, optimizer._own)
            return packed_with(optimizer._state_to_show(), optimizer._buckets, packed, places)

        self.register_state_dict_post_hook(shared, prepend=True)

    def _state_to_show(self) -> dict[int, Any] | None:
        """State by parameters' numbers; None: that in ``state``. Collective if DCP asks for whole tensors."""
        ranks, request = self._all_ranks, dcp_request()
        if self._tables and request is not None and ranks.size > 1:
            raise NotImplementedError(
                f"zerox: torch.distributed.checkpoint does not know tables, as {self._tables[0].member.quoted} of a "
                "param group with sparse=True: use zerox.save() and zerox.load(), or full_state_dict()"
            )
        if self._own and request not in (None, Request.FILLED_FROM_WHOLE) and ranks.size > 1:
            warn_of_dcp(self._own)
        if request in (Request.WHOLE, Request.WHOLE_ON_RANK_0):
            return self._state_for_dcp(request)
        if request is Request.FILLED_FROM_WHOLE:
            return {m.number: state for b in self._buckets for m, state in sliced_state(b, in_full(b))}
        if request is None and self._consolidated is not None:
            consolidated, self._consolidated = self._consolidated, None
            if consolidated.is_of(self._buckets):
                return consolidated.state
        if self._is_whole_here:
            return self._with_masks() if any(bucket.mask for bucket in self._buckets) else None
        return {member.number: state for bucket in self._buckets for member, state in whole_form(bucket)}

    @named("torch.distributed.checkpoint's getters of state with full_state_dict=True")
    def _state_for_dcp(self, request: Request) -> dict[int, dict[str, Any]]:
        self._settle(Meeting.FULL_STATE)
        if request is Request.WHOLE:
            return full_state(self._buckets, self._teams, None, self._all_ranks.device)
        self._say_whose(0)
        return full_state(self._buckets, self._teams, keeps=self._is_first_of_model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's own ``state_dict()``, or whole tensors: full_state_dict()'s, or torch.optim's.

        In place, and not collective; load the model first. As in torch, state that isn't given starts anew, and that of
        parameters which are frozen, or which the next step() takes in, waits in ``state`` until then. Warns of it, and
        of state that this optimizer's ``state_dtype`` and ``master_weights`` round. Raises ValueError, with nothing
        changed, for groups or sizes that don't fit, and for another rank's share. With several ranks, what it raises is
        remembered until this rank has loaded a state: see :mod:`zerox.state.failed_load`.
        """
        try:
            with state_uncast(self):
                super().load_state_dict(state_dict)
        except Exception as error:
            if self._ranks is not None and self._all_ranks.size > 1:
                self._failed_load = told_of(error)
            raise

    @named("full_state_dict()")
    def full_state_dict(self, to: int = 0) -> dict[str, Any]:
        """On rank ``to``, a dict on the CPU for the class in torch.optim to load; elsewhere ``{}``. Collective.

        It has whole tensors in the parameters' shapes, float32 (float64 beside float64 parameters), and in addition
        "master", float32, of parameters that have one. Above this, rank ``to`` needs memory for one bucket of one of
        these. Raises ValueError for a rank that the optimizer's group does not have. DTensors are whole too: of the
        ranks along their axes the first returns the dict. Of experts (param groups with a ``process_group``) it has
        those that rank ``to`` has, with a warning that names ranks with others.
        """
        state = self._full_state(to)
        is_here = self._all_ranks.rank == to and self._is_first_of_model
        if self._own:
            state = with_own(state, self.param_groups, self._own, self.state)
        return {"state": state, "param_groups": self._packed_groups()} if is_here else {}

    @named("consolidate_state_dict()")
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Makes the next ``state_dict()`` on rank ``to`` return that of ``full_state_dict()``, once. Collective.

        As in torch's ZeroRedundancyOptimizer, for code that saves the ``state_dict()`` of one rank. The other ranks'
        ``state_dict()`` stays their share, and so does this one's if anything changes the state meanwhile.
        """
        self._consolidated = None
        state = self._full_state(to)
        if self._all_ranks.rank == to and self._is_first_of_model and not self._is_whole_here:
            self._consolidated = Consolidated(state, [bucket.steps.clone() for bucket in self._buckets])

    def __setstate__(self, loaded: dict[str, Any]) -> None:
        """torch's load_state_dict() calls this between its own checks and the post-hooks: see Note [Loading state]."""
        check_groups(self._rules, self.param_groups, loaded["param_groups"])
        check_own(self._own, loaded["state"])
        check_state(self._buckets, loaded["state"])
        check_rows_given(self._tables, self._all_ranks, loaded["state"])
        # In place: wrappers of frameworks have this list too.
        self.param_groups[:] = groups_to_take(self._rules, self.param_groups, loaded["param_groups"], self.defaults)
        self._start_states()
        fill_state(self._buckets, loaded["state"])
        say_rounded(dict.fromkeys(fill_rows(self._tables, loaded["state"])))
        self._note_loaded()
        self._keep_waiting(loaded["state"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: its state is spread over ranks, and its hooks belong "
            "to the parameters. Use state_dict()"
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _refusal_of_load(self, meeting: Meeting) -> str:
        return refusal_after(self._failed_load, meeting)

    @property
    def _all_ranks(self) -> Ranks:
        assert self._ranks is not None
        return self._ranks

    @property
    def _is_first_of_model(self) -> bool:
        """Whether this rank is the first along all axes that DTensors lie on."""
        raise NotImplementedError

    @property
    def _is_whole_here(self) -> bool:
        """Whether this rank's state is that of whole parameters."""
        return self._all_ranks.size == 1 and not any(cuts_of(m.param) for b in self._buckets for m in b.members)

    def _with_masks(self) -> dict[int, dict[str, Any]]:
        """State by parameters' numbers, on one rank, with masks."""
        shown = {m.number: dict(self.state[m.param]) for b in self._buckets for m in b.members if m.param in self.state}
        for bucket in self._buckets:
            for member, state in sliced_state(bucket, [s for s in bucket.shown_state() if s.spec == MASK]):
                if MASK.key in state:
                    shown[member.number][MASK.key] = state[MASK.key].own.as_strided(
                        member.local.shape, dense_strides(member.local)
                    )
        return shown

    def _full_state(self, to: int) -> dict[int, dict[str, Any]]:
        size = self._all_ranks.size
        if to not in range(size):
            raise ValueError(f"to must be one of the optimizer's ranks, 0 to {size - 1}, got {to!r}")
        self._settle(Meeting.FULL_STATE)
        self._learn_kinds()
        self._say_whose(to)
        found = full_state(self._buckets, self._teams, to, keeps=self._is_first_of_model)
        for bucket in self._buckets:
            for member in bucket.members if found else ():
                shown = shown_in_group(bucket.rule, self.param_groups[member.group], found.pop(member.number))
                if shown:
                    found[member.number] = shown
        for table in self._tables:
            if state := whole_state(table, self._all_ranks, to):
                found[table.member.number] = state
        if self._all_ranks.rank == to and self._is_first_of_model:
            waiting = {m.number: self.state[m.param] for m in self._frozen if self.state.get(m.param)}
            found |= {number: state for number, state in waiting.items() if not _has_slices(state)}
        return dict(sorted(found.items()))

    def _say_whose(self, to: int) -> None:
        if self._ranks_have_own and self._all_ranks.rank == to and self._all_ranks.size > 1:
            warn_of_others(to)
        if (others := self._teams.first_of_others(to)) and self._all_ranks.rank == to:
            warn_caller(
                f"zerox: the whole state of rank {to} has its own experts only (param groups with a process_group). "
                f"full_state_dict(to=RANK) for the ranks {others} has the others', and zerox.save() has those of all",
            )

    def _learn_kinds(self) -> None:
        """On all ranks in this order: a class's new kinds of state are learned here."""
        for group in self.param_groups:
            self._rules.of(group).late(group)

    def _packed_groups(self) -> Any:
        """Param groups as in state_dict()."""
        kept, self._consolidated = self._consolidated, None
        groups = self.state_dict()["param_groups"]
        self._consolidated = kept
        return groups

    def _start_states(self, capturing: bool = False) -> None:
        """A group's option that asks for state may be turned on later: torch makes it at the next step too."""
        if start_states(self._buckets, self.param_groups, capturing):
            self._publish_state()

    @property
    def _shows(self) -> ShownState:
        if self._shown is None:
            self._shown = ShownState()
        return self._shown

    def _publish_state(self) -> None:
        """Puts views of this rank's state where torch keeps it."""
        self._consolidated = None
        self._shows.show(self.state, self._buckets, self._tables, self._all_ranks)
        self.state = self._shows.state

    def _take_written(self, meeting: Meeting | None = None) -> str:
        """What users wrote into ``state`` becomes this rank's. Returns why it can't be; else empty."""
        if meeting in OF_GRADIENTS or self._shows.is_as_shown(self.state):
            return ""
        why = take_written(self._shows, self.state, self._buckets, self._tables, self.param_groups)
        if not why:
            self._note_state_changes()
            self._publish_state()
        return why

    def _keep_waiting(self, loaded: Mapping[Any, Any]) -> None:
        """State of parameters that are not trained yet stands in ``state``, as in torch, until they are."""
        known = {id(m.param) for bucket in self._buckets for m in bucket.members} | {id(t.param) for t in self._tables}
        others = {p: given.state for p, given in loaded.items() if isinstance(p, Tensor) and id(p) not in known}
        for param in [p for p in self.state if isinstance(p, Tensor) and id(p) not in known]:
            del self.state[param]
        own = {param: as_loaded(param, state) for param, state in others.items() if state and id(param) in self._own}
        self.state.update({param: copy.deepcopy(dict(state)) for param, state in others.items() if state} | own)
        self._shows.note_seen()
        if frozen := [m.quoted for m in self._frozen if others.get(m.param)]:
            warn_caller(
                f"zerox: state was loaded for parameters that are frozen, as {frozen[0]}: until they are trained "
                "zerox.save() does not have it, and full_state_dict() only if it was loaded whole",
            )

    def _take_waiting(self, buckets: Sequence[Bucket], tables: Sequence[RowTable]) -> None:
        """State that was loaded for parameters before they had these buckets and tables. ValueError if it misfits."""
        params = [m.param for bucket in buckets for m in bucket.members] + [table.param for table in tables]
        given = {param: Uncast(self.state[param]) for param in params if self.state.get(param)}
        if given:
            check_state(buckets, given)
            check_rows_given(tables, self._all_ranks, given)
            fill_state(buckets, given)
            say_rounded(dict.fromkeys(fill_rows(tables, given)))

    def _agree_on_written(self) -> None:
        """RuntimeError on all ranks unless those that have a parameter's state wrote it together. Collective."""
        agree_on_written(self._shows, self._buckets, self._tables, self._teams)


def _has_slices(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, SlicedTensor) for value in state.values())
