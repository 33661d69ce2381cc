"""The torch optimizer that divides state, gradients and work over the data-parallel ranks, and owns step().

It names no update rule and no ZeRO stage: those are data. optimizers.py has the classes that users call.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch

from zerox._C import SyncPoint
from zerox.calls.capture import is_capturing
from zerox.memory.bucket import members_of
from zerox.optimizer.adoption import Adoption
from zerox.optimizer.core import Core
from zerox.optimizer.first_look import FirstLook
from zerox.optimizer.groups import Groups
from zerox.optimizer.hand_out import hand_out, hand_out_buffers
from zerox.optimizer.join import JoinFace, Joining
from zerox.optimizer.look_around import look_around
from zerox.optimizer.materialize import Materializer
from zerox.optimizer.mean_gradient import MeanGradient, MeanGradientFace
from zerox.optimizer.memory_bytes import MemoryBytes, measure
from zerox.optimizer.moved import Moved
from zerox.optimizer.on_meta import Init, check_asked, device_of
from zerox.optimizer.one_gradient import OneGradient, OneGradientFace
from zerox.optimizer.param_groups import ParamGroups, ParamGroupsFace, not_taken_in
from zerox.optimizer.profiled import range_of_zero_grad, with_hooks
from zerox.optimizer.steps import Steps
from zerox.options import OptimizerOptions, check_params, listed, tensors_in
from zerox.params.compiled_regions import calls_untraced
from zerox.params.overlap_gather import NOTHING_TO_HIDE, GatherOverlap
from zerox.params.params import ParamGather
from zerox.params.unwrapped_params import STEP_OPTIONS, OwnParams
from zerox.ranks.advice import advise_mesh
from zerox.ranks.calls import named
from zerox.ranks.group import call_ranks, find_ranks
from zerox.ranks.model_axes import find_axes
from zerox.ranks.process_group import GroupArgument
from zerox.ranks.wrapped import group_of
from zerox.rules.of_groups import Rules
from zerox.state.one_state import OneState, OneStateFace
from zerox.state.optimizer_state import OptimizerState, OptimizerStateFace
from zerox.update.update import FusedUpdate, Update


class Surroundings(NamedTuple):
    """Of a constructor's arguments those that say what there is around the optimizer: ranks, and the model."""

    process_group: GroupArgument
    norm_group: Any = None
    model: torch.nn.Module | None = None
    init: Init | None = None


class Engine(ParamGroupsFace, MeanGradientFace, OneGradientFace, JoinFace, OptimizerStateFace, OneStateFace):
    """``make_rules()`` update the parameters. What it, ``make_defaults`` or ``make_options`` refuses on one rank, all
    raise. Raises as :class:`zerox.FusedShardedAdam`. See Note [Parts of an optimizer].
    """

    profile_hook_step = staticmethod(with_hooks)  # torch wraps step() by it
    _make_update: ClassVar[type[Update]] = FusedUpdate

    def __init_subclass__(cls) -> None:
        calls_untraced(cls)

    def __init__(
        self,
        params: Any,
        make_rules: Callable[[], Rules],
        make_defaults: Callable[[], dict[str, Any]],
        make_options: Callable[[], OptimizerOptions],
        around: Surroundings,
    ) -> None:
        params = listed(params)
        own = OwnParams(params)
        process_group = group_of(tensors_in(params), around.process_group)
        with call_ranks(process_group) as roll_call:
            rules = make_rules()
            defaults = make_defaults()
            groups = self._groups = Groups(self, rules, make_options())
            super().__init__(params, defaults)
            members = list(members_of(self.param_groups, own.params))
            tensors = [m.param for m in members]
            check_asked(around.model, around.init, members)
            check_params([m.name for m in members], tensors, has_model=around.model is not None)
            device = device_of(tensors, process_group)
            groups.options.check_pairs({}, device={device.type})
            model = find_axes(tensors, lambda i: members[i].quoted, process_group, around.norm_group)
            exchange = groups.options.exchange
            ranks = find_ranks(
                process_group, device, roll_call, exchange, has_owners=rules.have_owners(self.param_groups)
            )
        advise_mesh(ranks, process_group, groups.options.stage_plan)
        with ranks.failure_told():
            core = self._core = Core(ranks, groups, own, model, self._make_update)
            if around.model is not None:
                groups.model = weakref.ref(around.model)
            adoption = self._adoption = Adoption(core)
            self._groups = ParamGroups(core, adoption)
            self._state = OptimizerState(core)
            self._one_state = OneState(core, self._state)
            self._steps = Steps(core)
            self._joining = Joining(core, self._steps, adoption)
            self._mean = MeanGradient(core)
            self._one_gradient = OneGradient(core)
            Moved(core)
            FirstLook(core)
            weakref.finalize(self, core.let_go).atexit = False
        adoption.adopt(members, Materializer.of(around.model, around.init, members, ranks))
        groups.note_seen()

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
        core, steps, calls = self._core, self._steps, self._core.calls
        capturing = is_capturing(core.ranks, core.options.capturable, core.grads.manager, calls.record)
        with core.gather.updating():
            if not capturing:
                has_options = core.update.has_step_options
                refusal = calls.own.refusal(STEP_OPTIONS) if has_options else ""
                result = core.sync(SyncPoint.STEP, [float(has_options)], refusal)
                steps.check(result, follows=False)
                if not calls.record.has_looked:
                    look_around(core, result)
            steps.update(capturing)
        calls.own.update(self.param_groups, core.rules, core.loading.shows)
        steps.end()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch; discards reduced gradients too, also those on their way.

        Local, but in stage 1 after a backward that raised it tells the other ranks, who wait at the end of theirs.
        """
        core = self._core
        with range_of_zero_grad(self):
            core.grads.zero(set_to_none)
        core.calls.zero([*core.frozen, *not_taken_in(core)], set_to_none)

    def no_sync(self, *, outer: bool = False) -> AbstractContextManager[None]:
        """Inside, backward sends nothing: gradients stay local and add up, to leave with the next backward outside.

        ``outer``: on a mesh (replicate, shard), in stage 2, gradients are added up along the shard axis after each
        backward. The sums wait there, and go along the replicate axis with the next backward outside. Else ValueError.
        """
        grads = self._core.grads
        return grads.inner_sync(joins=self._joining.divide is not None) if outer else grads.no_sync()

    def synchronize(self) -> None:
        """Waits for everything on its way. Collective. Needed between two backwards that use reentrant checkpoints.
        With ``capturable=True`` the first one compares the parameters over the ranks, as the first step() does."""
        core = self._core
        result = core.sync(SyncPoint.SYNCHRONIZE)
        if core.options.capturable:
            look_around(core, result)  # a capture can't
            core.update.refresh(self.param_groups)  # a replay of step() reads the numbers that hold now

    def overlap_gather(self, model: torch.nn.Module | None) -> None:
        """Hides the gather of updated parameters under the next forward of ``model`` or of its parts. None: no more.

        step() then returns before parameters are whole; they arrive in the order in which rank 0's forward used them.
        An operator that reads one waits for it, a compiled one too, a module's forward for its own, and state_dict()
        for all. Call synchronize() before memory is read without operators (numpy, torch.save of a whole model, the
        replay of a CUDA graph, what was compiled ahead of time), and this method again when modules were added.
        """
        core = self._core
        core.gather.wait()
        if not isinstance(core.gather, ParamGather):
            if model is not None:
                warnings.warn(NOTHING_TO_HIDE, stacklevel=2)
            return
        self._adoption.check_pairs([], overlaps=model is not None)
        core.overlap = None if model is None else GatherOverlap(core.gather, core.buckets, model)

    def whole(self) -> AbstractContextManager[None]:
        """``with optimizer.whole():`` every parameter is whole and in place, with ``stage=3`` too, whatever reads it.

        A rank may enter alone to read; calls nest. If parameters are written inside, all ranks must write the same, and
        the end is collective: ValueError that names a parameter if they differ. If the block raises, what was written
        is taken back. In other stages this waits for what overlap_gather() hides.
        """
        return self._core.gather.whole()

    @named("unshard()")
    def unshard(self) -> None:
        """With ``stage=3``, makes all parameters whole for good, on every rank, and lets their shards go. Collective.

        Afterwards no rank needs another one to read them, and ``step()`` raises: build a new optimizer, and give it
        this one's ``state_dict()``. RuntimeError inside ``whole()``, or if a rank is gone. In other stages parameters
        are whole already, and this waits for what overlap_gather() hides.
        """
        self._core.gather.unshard()
        with self._core.loading.pulls.of_all:
            for bucket in self._core.buckets:
                bucket.param_shard = bucket.buffer.shard(bucket.rank)

    # ---- parameters --------------------------------------------------------------------------------------------------

    @named("broadcast_parameters()")
    @torch.no_grad()
    def broadcast_parameters(self) -> None:
        """Gives every rank rank 0's values of the parameters, as they stand; master weights follow. Collective.

        For a script in which rank 0 alone has loaded or changed weights since the optimizer was built. With ``stage=3``
        that goes for ``p.data = ...``, since other writes are of all ranks.
        """
        hand_out(self._core)
        self._state.note_changes()

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Gives every rank rank 0's values of the model's buffers. Collective."""
        ranks = self._core.ranks
        ranks.check_here()
        if self._joining.divide is not None:
            self._core.sync(SyncPoint.BROADCAST_BUFFERS)
        hand_out_buffers(ranks, model)

    def memory_bytes(self) -> MemoryBytes:
        """Bytes that this rank holds, by category, once what is on its way has been reduced; see
        :func:`zerox.estimate`.
        """
        return measure(self._core)
