"""Ranks with unequal numbers of batches: one that has run out follows the others: Note [Followers] in sync_points.h."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join

from zerox._C import SyncPoint, SyncResult
from zerox._torch import OFF, JoinConfig, check_join
from zerox.calls.phases import Visit
from zerox.grads.grads import Grads
from zerox.optimizer.adoption import Adoption
from zerox.optimizer.core import Core, Face
from zerox.optimizer.followers import follow, leave
from zerox.optimizer.steps import Steps

ALL, ACTIVE = "all", "active"
STEP_ENDS = (SyncPoint.STEP, SyncPoint.SKIP_STEP)
ASK_NOTHING = (SyncPoint.FOLLOW, SyncPoint.SYNCHRONIZE, SyncPoint.MEAN_OVER, SyncPoint.SKIP_STEP)  # of the mean


class Joining:
    """What join() has of an optimizer. ``divide``: of the join() that it is inside; None: outside. ``config``: torch's.
    ``is_wrapped``: a wrapper inside join() follows it. Phases: "notice", "join" and "active ranks"."""

    def __init__(self, core: Core, steps: Steps, adoption: Adoption) -> None:
        self.core = core
        self.steps = steps
        self.adoption = adoption
        self.divide: str | None = None
        self.is_notified = False  # torch's Join knows of this step
        self.by_active = False  # p.grad is a mean over the active ranks: see Following in sync_points.h
        self.is_wrapped = False
        self.config = OFF
        core.joining = self
        core.phases.before_sync("notice", self._before_waiting)
        core.phases.before_sync("join", self._before_sync)
        core.phases.after_sync("active ranks", self._after_sync)

    @property
    def grads(self) -> Grads:
        return self.core.grads

    def check(self) -> None:
        """Raises for an option that does not go with join()."""
        self.adoption.check_pairs([], self.core.overlap is not None, joins=True)

    def joined(self, divide: str) -> Join:
        self.check()
        return Join([self], divide)

    def set(self, divide: str | None) -> None:
        """This is inside a join() with this ``divide``, or outside."""
        self.divide = divide
        # Where gradients are whole, p.grad is so for whoever reads it before step(). Not with divisors of the user's,
        # which another number of active ranks does not touch.
        has_divisor = any(each is not None for each in self.core.calls.scale.of_groups)
        self.by_active = divide == ACTIVE and not self.grads.sharded and not has_divisor
        self.grads.manager.synchronizer.set_following(by_backward=False, by_active=self.by_active)

    def begin_torchs(self, kwargs: Mapping[str, Any]) -> FollowHook:
        """It is inside of torch's Join, which has these arguments."""
        check_join()
        self.check()
        end([self])  # torch's Join does not say so if its block raised
        begin([self], divide_of(kwargs), together=_has_wrapper(self))
        to_self = weakref.ref(self)

        def before_backward_end() -> None:
            if (joining := to_self()) is not None:
                joining.notify()

        self.grads.manager.synchronizer.set_before_backward_end(before_backward_end)
        return FollowHook(self)

    def leave_torchs(self) -> None:
        """It is outside of torch's Join again."""
        end([self])
        self.is_notified = False
        self.config = OFF
        self.grads.manager.synchronizer.set_before_backward_end(None)

    def follow(self) -> SyncPoint:
        """Takes part in the others' next call, and returns its sync point: FOLLOW if all ranks follow. Collective."""
        self.core.calls.own.rests = True
        try:
            with torch.no_grad():
                return self._follow_one()
        finally:
            self.core.calls.own.rests = False

    def _follow_one(self) -> SyncPoint:
        with self.core.gather.updating():
            result = self.core.sync(SyncPoint.FOLLOW)
            if result.sync_point == SyncPoint.STEP:
                self.steps.check(result, follows=True)
                self.steps.update(capturing=False)
        if result.sync_point == SyncPoint.STEP:
            self.steps.end()
        else:
            self._take_part(result)
        return result.sync_point

    def _take_part(self, result: SyncResult) -> None:
        """In a call of the others, other than step()."""
        calls = self.core.calls
        parts: dict[SyncPoint, Callable[[SyncResult], object]] = {
            SyncPoint.CLIP: calls.clip,
            SyncPoint.CLIP_TOGETHER: calls.clip_together,
            SyncPoint.CLIP_VALUE: calls.limit,
            SyncPoint.MEAN_OVER: calls.mean_over,
            SyncPoint.SCALE_GRADS: calls.multiply,
            SyncPoint.UNSCALE: calls.unscale,
            SyncPoint.SKIP_STEP: calls.skip,
            SyncPoint.GRAD_NORM: calls.answers.take_part,
        }
        if result.sync_point in parts:  # else there is nothing to do but to meet
            parts[result.sync_point](result)

    def take_options(self, result: SyncResult, follows: bool) -> None:
        """Where ranks' options differ, a follower takes those of the others. Collective. RuntimeError if these
        differ."""
        ranks, groups = self.core.ranks, self.core.groups.param_groups
        own = (self.divide, None if follows else options_of(groups))
        said = [pickle.loads(each) for each in ranks.all_gather_bytes(pickle.dumps(own))]
        for rank, (joining, options) in enumerate(said):
            if joining != said[result.speaker][0]:
                raise RuntimeError(
                    f"zerox: rank {rank} is inside join(divide={joining!r}) and rank {result.speaker} inside "
                    f"join(divide={said[result.speaker][0]!r}): all ranks must be inside the same (None: outside)"
                )
            if options not in (None, said[result.speaker][1]):
                raise RuntimeError(
                    "zerox: in step() ranks have param groups with different options, such as lr; set them alike: "
                    f"rank {rank} has {options}, rank {result.speaker} has {said[result.speaker][1]}"
                )
        if follows:
            for group, options in zip(groups, said[result.speaker][1], strict=True):
                group.update(options)

    def notify(self) -> None:
        """Once a step, before ranks synchronize: ranks in torch's Join wait for this before they follow."""
        if self.config.enable and not self.is_notified:
            self.is_notified = True
            torch_join.Join.notify_join_context(self.core.groups.optimizer)  # type: ignore[arg-type]

    # ---- phases

    def _before_waiting(self, visit: Visit) -> None:
        if self.config.enable and not visit.follows:
            self.notify()

    def _before_sync(self, visit: Visit) -> None:
        if self.divide is not None:
            visit.options = digest_of(self.core.groups.param_groups, self.divide)

    def _after_sync(self, visit: Visit) -> None:
        """Means over all ranks that were not called for otherwise become those over the active ones."""
        calls, result = self.core.calls, visit.result
        if self.by_active:
            if result.sync_point not in (SyncPoint.FOLLOW, SyncPoint.SKIP_STEP):
                calls.scale.requested.num_active = result.num_active  # for mean_over()
        elif self.divide == ACTIVE and (result.operators or result.sync_point not in ASK_NOTHING):
            calls.divide_by_active(result)


class JoinFace(Face):
    """For torch's Join, a ``torch.distributed.algorithms.Joinable``."""

    _joining: Joining

    def join(self, divide: str = "all") -> Join:
        """``with optimizer.join():`` around a training loop: ranks may have unequal numbers of batches.

        A rank that comes to the end of the block follows the others' calls, without gradients of its own, until all
        have come: the ends of backward, ``step()``, ``synchronize()``, ``clip_grad_norm_()``, ``clip_grad_value_()``,
        ``mean_over()`` (it counts 0), ``scale_grads_()``, a scaler's calls, :func:`zerox.clip_grad_norm_`.

        ``divide``: what the gradient is a mean over: "all" ranks, as with DDP's Join, or the "active" ones, which had
        a batch in this step. A ``gradient_divisor`` of yours, and ``mean_over()``, are not touched by it.

        All ranks must come inside. If the block raises on one rank, the others raise RuntimeError with its reason, and
        the optimizer can't be used any more. What can't be followed (``zerox.save()``, ``full_state_dict()``,
        ``add_param_group()``, ``broadcast_buffers()``) raises on all ranks if one has run out of batches. torch's own
        ``Join([optimizer])`` does the same, with a message of its own in each step.
        """
        return self._joining.joined(divide)

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """``divide_by_initial_world_size=False`` among Join's arguments is ``divide="active"`` of join()."""
        return self._joining.begin_torchs(kwargs)

    @property
    def join_device(self) -> torch.device:
        return self._core.ranks.device

    @property
    def join_process_group(self) -> Any:
        return self._core.ranks.given or dist.group.WORLD

    @property
    def _join_config(self) -> JoinConfig:
        return self._joining.config

    @_join_config.setter
    def _join_config(self, config: JoinConfig) -> None:
        """torch's Join sets it."""
        self._joining.config = config


torch_join.Joinable.register(JoinFace)


class HookOfWrapper(Protocol):
    joined: Sequence[Joining]  # that it follows


# For torch's Join, which makes the hooks of all that it is given before it begins.
hooks_of_wrappers: weakref.WeakSet[HookOfWrapper] = weakref.WeakSet()


def divide_of(kwargs: Mapping[str, Any]) -> str:
    """The ``divide`` of join() that torch's Join asks for."""
    return ALL if kwargs.get("divide_by_initial_world_size", True) else ACTIVE


def begin(joined: Sequence[Joining], divide: str, together: bool = False) -> None:
    """``together``: with a wrapper in torch's Join, which does not say so if its block raises."""
    if divide not in (ALL, ACTIVE):
        raise ValueError(f"divide must be {ALL!r} or {ACTIVE!r}, got {divide!r}")
    if not together:
        check_outside()
        for each in joined:
            note_inside(each)
    for each in joined:
        each.set(divide)


def note_inside(joined: object) -> None:
    """This thread is inside a join() with this optimizer, or of a wrapper, until note_outside()."""
    _inside.each.add(joined)


def note_outside(joined: object) -> None:
    _inside.each.discard(joined)


def check_outside(beside_wrappers: bool = False) -> None:
    """RuntimeError inside a join(). ``beside_wrappers``: but for what torch's Join is given beside a wrapper."""
    if not all(beside_wrappers and _has_wrapper(each) for each in _inside.each):
        raise RuntimeError(
            "this is inside another join() already, and a rank can't follow two loops, one inside the other: "
            "zerox.join([one, another]) follows several optimizers"
        )


def _has_wrapper(joined: object) -> bool:
    return any(joined in each.joined for each in hooks_of_wrappers)


def end(joined: Sequence[Joining]) -> None:
    for each in joined:
        each.set(None)
        each.is_wrapped = False
        note_outside(each)


class _Inside(threading.local):
    """What this thread is inside a join() with: optimizers, and what a wrapper's is."""

    def __init__(self) -> None:
        self.each: weakref.WeakSet[object] = weakref.WeakSet()


_inside = _Inside()


class FollowHook(torch_join.JoinHook):
    def __init__(self, joining: Joining) -> None:
        self.joining = joining

    def main_hook(self) -> None:
        """One step of the others, unless a wrapper beside it in Join follows all of them."""
        while not self.joining.is_wrapped and self.joining.follow() not in (SyncPoint.FOLLOW, *STEP_ENDS):
            pass

    def post_hook(self, is_last_joiner: bool) -> None:
        self.joining.leave_torchs()


class Join(AbstractContextManager[None]):
    """See ``optimizer.join()``, and :func:`join` for several optimizers."""

    def __init__(self, joined: Sequence[Joining], divide: str) -> None:
        self.joined = joined
        self.divide = divide

    def __enter__(self) -> None:
        begin(self.joined, self.divide)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                follow(self.joined)
            else:
                leave(self.joined, error)
        finally:
            end(self.joined)


def join(optimizers: JoinFace | Iterable[JoinFace], divide: str = ALL) -> Join:
    """``with zerox.join([one, another]):`` as ``optimizer.join()``, for several optimizers in one loop."""
    given = [optimizers] if isinstance(optimizers, JoinFace) else list(optimizers)
    joined = [joining_of(optimizer) for optimizer in given]
    for each in joined:
        each.check()
    return Join(joined, divide)


def joining_of(optimizer: JoinFace) -> Joining:
    return optimizer._joining


def options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers in the param groups, which step() reads."""
    return [{key: value for key, value in group.items() if _is_number(value)} for group in groups]


def digest_of(groups: Sequence[dict[str, Any]], divide: str) -> float:
    """Of these numbers and join()'s ``divide``: the same in every process, and not 0."""
    found = hash((divide == ACTIVE, *(tuple(group.values()) for group in options_of(groups))))
    return float(1 + found % (2**52))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(each) for each in value)
    return isinstance(value, bool | int | float)
