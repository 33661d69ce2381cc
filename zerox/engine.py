"""The torch optimizer that divides state, gradients and work over the data-parallel ranks, and owns step().

It names no update rule and no ZeRO stage: those are data. optimizers.py has the classes that users call.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerox._C import Meeting, Outcome
from zerox.flow.bucket_plans import plan_trained
from zerox.flow.capture import is_capturing
from zerox.flow.compiled_regions import calls_untraced
from zerox.flow.first_look import check_same_params, digest_of_params
from zerox.flow.grad_calls import READ_THE_MEAN, GradCalls
from zerox.flow.grad_scale import GradScale
from zerox.flow.grads import Grads
from zerox.flow.hand_out import hand_out, hand_out_buffers
from zerox.flow.inside import Inside, Loading
from zerox.flow.join import digest_of
from zerox.flow.look_around import look_around
from zerox.flow.memory_bytes import MemoryBytes, measured
from zerox.flow.moved import taken_back
from zerox.flow.one_gradient import OneGradient
from zerox.flow.overlap_gather import NOTHING_TO_HIDE, GatherOverlap
from zerox.flow.param_groups import ParamGroups
from zerox.flow.params import ParamGather
from zerox.flow.profiled import range_named, with_hooks
from zerox.flow.residency import made_gather
from zerox.flow.row_refusals import check_rows
from zerox.flow.terms import check_axes, check_model, check_terms
from zerox.flow.unwrapped_params import STEP_OPTIONS, OwnParams
from zerox.flow.update import FusedUpdate, Update
from zerox.memory.bucket import Bucket, Member, members_of, rooms
from zerox.memory.flat import give_out
from zerox.memory.grad_dtype import Widened
from zerox.memory.shared import Shared
from zerox.options import OptimizerOptions, Planned, check_params, listed, tensors_in
from zerox.ranks.advice import advise_mesh
from zerox.ranks.calls import named
from zerox.ranks.group import Ranks, call_ranks, find_ranks
from zerox.ranks.holders import note_held
from zerox.ranks.model_axes import find_axes
from zerox.ranks.process_group import GroupArgument
from zerox.ranks.wrapped import decisions, group_of
from zerox.rules.of_groups import Rules
from zerox.state.one_state import OneState


class Engine(ParamGroups, OneGradient, OneState):
    """``make_rules()`` update the parameters. What it, ``make_defaults`` or ``make_options`` refuses on one rank, all
    raise. Raises as :class:`zerox.FusedShardedAdam`.
    """

    profile_hook_step = staticmethod(with_hooks)  # torch wraps step() by it
    _overlap = Shared[GatherOverlap | None](None)

    def __init_subclass__(cls) -> None:
        calls_untraced(cls)

    def __init__(
        self,
        params: Any,
        make_rules: Callable[[], Rules],
        make_defaults: Callable[[], dict[str, Any]],
        make_options: Callable[[], OptimizerOptions],
        process_group: GroupArgument,
        norm_group: Any = None,
    ) -> None:
        self._shared: dict[str, Any] = {}
        params = listed(params)
        own = OwnParams(params)
        process_group = group_of(tensors_in(params), process_group)
        with call_ranks(process_group) as roll_call:
            self._rules = make_rules()
            defaults = make_defaults()
            self._options = make_options()
            self._buckets: list[Bucket] = []
            self._ranks: Ranks | None = None  # until the constructor has all groups
            super().__init__(params, defaults)
            members = list(members_of(self.param_groups, own.params))
            check_params([m.name for m in members], [m.param for m in members])
            device = members[0].param.device if members else torch.device("cpu")
            self._options.check_pairs({}, device={device.type})
            model = find_axes([m.param for m in members], lambda i: members[i].quoted, process_group, norm_group)
            self._ranks = find_ranks(process_group, device, roll_call)
        advise_mesh(self._ranks, process_group, self._options.stage_plan)
        with self._ranks.failure_told():
            self._grads = Grads(
                self._ranks,
                self._options.stage_plan,
                self._options.reduce_dtype,
                self._options.capturable,
                divides=any(self._divisor_of(group) is not None for group in self.param_groups),
                model=model,
            )
            self._grads.teams.take(self.param_groups)
            self._gather = made_gather(self._grads.manager, self._ranks, self._options)
            self._widened = Widened(self._options.accumulate_dtype)
            weakref.finalize(self, self._widened.give_back).atexit = False
            scale = GradScale(self._grads.manager, device, keeps_place=self._options.capturable)
            self._calls = GradCalls(self._grads, scale, self._buckets, own, self._gather.shards_params)
            self._calls.answers.settle = weakref.WeakMethod(self._settle)
            self._update = self._made_update()
            self._share_state()
        self._adopt(members)
        self._note_groups()

    # ---- the training loop -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters from the gradients' mean over the ranks. Collective.

        Afterwards parameters are whole and safe to read (see overlap_gather()). Returns what ``closure`` returned.
        Raises RuntimeError inside ``no_sync()``, and on every rank if they ran different numbers of backwards or one
        of those raised; state is then as it was before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capturing = is_capturing(self._all_ranks, self._options.capturable, self._gather.manager, self._calls.record)
        with self._gather.updating():
            if not capturing:
                refusal = self._calls.own.refusal(STEP_OPTIONS) if self._has_step_options else ""
                outcome = self._settle(Meeting.STEP, [float(self._has_step_options)], refusal)
                self._check_options(outcome, follows=False)
                if not self._calls.record.has_looked:
                    look_around(self.inside, outcome)
            self._update_all(capturing)
        self._calls.own.update(self.param_groups, self._rules, self._shows)
        self._end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch; discards reduced gradients too, also those on their way.

        Local, but in stage 1 after a backward that raised it tells the other ranks, who wait at the end of theirs.
        """
        with range_named(self._zero_grad_profile_name):
            self._grads.zero(set_to_none)
        self._calls.zero([*self._frozen, *self._not_taken_in()], set_to_none)

    def no_sync(self, *, outer: bool = False) -> AbstractContextManager[None]:
        """Inside, backward sends nothing: gradients stay local and add up, to leave with the next backward outside.

        ``outer``: on a mesh (replicate, shard), in stage 2, gradients are added up along the shard axis after each
        backward. The sums wait there, and go along the replicate axis with the next backward outside. Else ValueError.
        """
        return self._grads.inner_sync(joins=bool(self._joining)) if outer else self._grads.no_sync()

    def synchronize(self) -> None:
        """Waits for everything on its way. Collective. Needed between two backwards that use reentrant checkpoints.
        With ``capturable=True`` the first one compares the parameters over the ranks, as the first step() does."""
        outcome = self._settle(Meeting.SYNCHRONIZE)
        if self._options.capturable:
            look_around(self.inside, outcome)  # a capture can't
            self._update.refresh(self.param_groups)  # a replay of step() reads the numbers that hold now

    def overlap_gather(self, model: torch.nn.Module | None) -> None:
        """Hides the gather of updated parameters under the next forward of ``model`` or of its parts. None: no more.

        step() then returns before parameters are whole; they arrive in the order in which rank 0's forward used them.
        An operator that reads one waits for it, a compiled one too, a module's forward for its own, and state_dict()
        for all. Call synchronize() before memory is read without operators (numpy, torch.save of a whole model, the
        replay of a CUDA graph, what was compiled ahead of time), and this method again when modules were added.
        """
        self._gather.wait()
        if not isinstance(self._gather, ParamGather):
            if model is not None:
                warnings.warn(NOTHING_TO_HIDE, stacklevel=2)
            return
        self._check_pairs([], overlaps=model is not None)
        self._overlap = None if model is None else GatherOverlap(self._gather, self._buckets, model)

    def whole(self) -> AbstractContextManager[None]:
        """``with optimizer.whole():`` every parameter is whole and in place, with ``stage=3`` too, whatever reads it.

        A rank may enter alone to read; calls nest. If parameters are written inside, all ranks must write the same, and
        the end is collective: ValueError that names a parameter if they differ. If the block raises, what was written
        is taken back. In other stages this waits for what overlap_gather() hides.
        """
        return self._gather.whole()

    # ---- parameters --------------------------------------------------------------------------------------------------

    @named("broadcast_parameters()")
    @torch.no_grad()
    def broadcast_parameters(self) -> None:
        """Gives every rank rank 0's values of the parameters, as they stand; master weights follow. Collective.

        For a script in which rank 0 alone has loaded or changed weights since the optimizer was built. With ``stage=3``
        that goes for ``p.data = ...``, since other writes are of all ranks.
        """
        hand_out(self.inside)
        self._note_state_changes()

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Gives every rank rank 0's values of the model's buffers. Collective."""
        self._all_ranks.check_here()
        if self._joining:
            self._settle(Meeting.BROADCAST_BUFFERS)
        hand_out_buffers(self._all_ranks, model)

    def memory_bytes(self) -> MemoryBytes:
        """Bytes that this rank holds, by category, once what is on its way has landed; see :func:`zerox.estimate`."""
        return measured(self.inside)

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def inside(self) -> Inside:
        """For tests, tools and zerox.checkpoint. Not a promise: it may change with any version."""
        looked_at = self._rules, self._buckets, self._frozen, self._all_ranks, self._grads, self._gather, self._calls
        loading = Loading(self._start_states, self._note_loaded, self._failed_load)
        return Inside(*looked_at, self._update, self._sparsity, self._settle, loading)

    def _made_update(self) -> Update:
        return FusedUpdate(self._rules, self._buckets, self._grads, self._calls.scale, self._options.capturable)

    def _note_loaded(self) -> None:
        super()._note_loaded()
        self._calls.record.has_looked = False
        self._update.note_loaded(self.param_groups)

    def _check_join(self) -> None:
        self._check_pairs([], self._overlap is not None, joins=True)

    def _adopt(self, members: Sequence[Member]) -> None:
        """Makes buckets for the trainable ones of ``members``; watches the others. Collective."""
        ranks = self._all_ranks
        trained = [m for m in members if m.param.requires_grad]
        with ranks.refusals_told():
            self._check_pairs(members, self._overlap is not None)
            check_axes(self._grads.model, members)
            check_rows(self.param_groups, members, self._grads, self._gather.shards_params)
        check_terms(self._options, self._grads.teams, self.param_groups, members)
        self._calls.own.agree(ranks, [*self.inside.members, *members])
        with ranks.failure_told():
            check_model(self._grads.model, ranks, self._options, self.param_groups, members)
            self._take_over(members, trained)
        ranks.meet("all have made their buckets")

    def _take_over(self, members: Sequence[Member], trained: Sequence[Member]) -> None:
        adopted = {id(m.param) for m in trained}
        note_held(self, [m.param for m in members])
        self._frozen = list({id(m.param): m for m in (*self._frozen, *members) if id(m.param) not in adopted}.values())
        still = [member for member in members if not member.param.requires_grad]
        divisors = [self._divisor_of(group) for group in self.param_groups]
        trained = self._calls.take_tables(trained, self.param_groups, self._rules, self._options, divisors)
        model, teams = self._grads.model, self._grads.teams
        plans = plan_trained(self._options, self._rules, teams, model, self.param_groups, trained)
        shared_out: list[Planned] = [(m.name, m.local, "", None, ()) for m in still if self._gather.shards_params]
        plans_of_still = self._options.plan(shared_out, teams.ranks.backend, teams.ranks.size)
        added = [*rooms([plan for plan, _ in plans], trained), *rooms(plans_of_still, still)]
        self._gather.check_room([*added, *self._calls.row_grads.rooms()])
        frozen = self._gather.take_frozen([m for m in still if teams.of_group[m.group] is teams.all], plans_of_still)
        for member in still:
            teams.of_group[member.group].broadcast_own(member.local, f"parameter '{member.name}'")
            model.broadcast_values(member.local, model.replicated_over(member.param))
        self._widened.take(m.param for m in members if m.param.requires_grad)
        made = []
        for plan, team in plans:
            inside = [trained[i] for i in plan.params]
            groups = [self.param_groups[m.group] for m in inside]
            rule = self._rules.of(groups[0])
            specs = [*rule.wanted(groups), *self._options.masters(inside[0].param.dtype)]
            bucket = Bucket(plan, inside, team.rank, rule, specs, self._gather.make_buffer)
            team.ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(len(self._buckets))}")
            model.broadcast(bucket.buffer.flat, model.replicated_over(inside[0].param))
            give_out(bucket.buffer.slots())
            bucket.start()
            divisor = self._divisor_of(groups[0])
            made.append((self._grads.add_bucket(bucket, divisor, team), bucket))
            self._calls.scale.add_bucket(divisor)
            self._buckets.append(bucket)
            self._update.add_bucket(bucket, self.param_groups)
        self._calls.scale.of_groups = divisors
        self._grads.let_decide(decisions())
        self._gather.add_buckets(made, frozen, self._calls.row_grads.tables)
        if plans and self._overlap is not None:
            self._overlap.learn_buckets()
        self._take_waiting([bucket for _, bucket in made], [t for t in self._tables if id(t.param) in adopted])
        self._publish_state()

    def _settle(self, meeting: Meeting, arguments: Sequence[float] = (), refusal: str = "") -> Outcome:
        self._all_ranks.check_here()
        follows = meeting is Meeting.FOLLOW
        if not follows:
            self._notify()
        self._gather.wait()
        unfrozen = [m for m in self._frozen if m.param.requires_grad]
        elsewhere, misfit = taken_back(self._buckets, self._grads.moved(), meeting)
        regrouped = self._regrouped()
        refusal = refusal or self._refusal_of_load(meeting) or self._gather.failure(forget=meeting is Meeting.STEP)
        refusal = refusal or misfit or self._grads.replaced() or (regrouped.refusal if regrouped else "")
        refusal = refusal or self._take_written(meeting) or self._calls.refusal_to_go_on(meeting, unfrozen)
        values = [] if refusal else self._gather.found_elsewhere(elsewhere)
        options = digest_of(self.param_groups, self._joining) if self._joining else 0.0
        looks = meeting in (Meeting.STEP, *([Meeting.SYNCHRONIZE] if self._options.capturable else []))
        params = digest_of_params(self.inside) if looks and not self._calls.record.has_looked else 0.0
        news = bool(unfrozen or regrouped or self._shows.written)
        outcome = self._grads.settle(meeting, arguments, options, params, int(news), refusal)
        if outcome.adopts:
            self._agree_on_written()
            self._take_groups(regrouped)
            self._adopt([m for m in self._frozen if m.param.requires_grad])
            outcome = self._grads.settle(meeting, arguments, options, params, refusal=self._calls.pack_rows(meeting))
        if self._grads.partial.buckets and outcome.meeting in READ_THE_MEAN:
            self._grads.partial.refresh()
        if self._calls.row_grads.each:
            self._calls.exchange_rows(outcome.meeting)
        if not outcome.has_same_params:
            check_same_params(self.inside)
        self._calls.scale.forget_if_discarded()
        self._divide_by_active(outcome)
        self._calls.writer.do_as_noted(outcome)
        self._calls.answers.note_call(outcome)
        if not follows or outcome.meeting == Meeting.STEP:
            self._gather.elsewhere = elsewhere
            self._gather.take_in(elsewhere, values)
        return outcome

    def _updating(self) -> AbstractContextManager[None]:
        return self._gather.updating()

    def _update_all(self, capturing: bool) -> None:
        self._start_states(capturing)
        self._note_state_changes()
        if self._calls.row_grads.each:
            self._gather.publish_tables(self._calls.row_grads.update(self.param_groups, self._calls.scale))
        overlap = self._overlap is not None and not capturing
        for run in self._update.runs(self.param_groups, capturing) if self._buckets else ():
            for index in run:
                self._gather.start(index, background=overlap)
        if not capturing:
            self._grads.manager.settlement.bump_versions()
        self._gather.end_step(hidden=overlap)

    def _end_step(self) -> None:
        give_out(self._gather.elsewhere)
        self._calls.end_step()
        self._end_notice()
