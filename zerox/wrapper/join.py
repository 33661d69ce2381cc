"""Ranks with unequal numbers of batches, around a wrapper: ``ddp.join()``, and torch's ``Join([ddp, optimizer])``.

Note [Wrappers inside join]
Two things are followed apart from each other. Threads follow the module's optimizers and its left-over gradients, each
where its own ranks synchronize (Note [Followers] in sync_points.h). The forwards of the others are followed by the
thread that has come to the end of the block, in the messages of torch's Join and of its DistributedDataParallel: that a
rank still has batches, whose buffers all take, and whether the next forward hands out any. So it does not matter how
many forwards, backwards and steps make an iteration.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms import join as torch_join

from zerox import _C as C
from zerox._torch import OFF, JoinConfig, check_join
from zerox.grads.grads import Grads
from zerox.model_names import quote
from zerox.optimizer import join as of_optimizers
from zerox.optimizer.followers import Followers, leave
from zerox.ranks.calls import waiting
from zerox.ranks.dtensors import local_of
from zerox.wrapper.averaging import Averaging
from zerox.wrapper.first_values import engines_of, size_of
from zerox.wrapper.values import broadcast, check_same

LOOK_EVERY_S = 2e-4  # whether what follows has failed, while this rank waits for the others' next forward
FAILURE_RECORD_S = 5.0
# What the errors of throw_on_early_termination say, in torch's words.
RAN_OUT, OTHER_RAN_OUT = "exhausted all inputs.", "at least one rank that exhausted inputs"


class Joined(Protocol):
    """What is asked of a wrapper."""

    process_group: dist.ProcessGroup | None
    device: torch.device
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    modules_buffers: list[Tensor]
    _averaging: Averaging
    _join_config: JoinConfig

    def will_sync_module_buffers(self) -> bool: ...
    def _find_buffers(self) -> None: ...
    def _hand_out_buffers(self, root: int) -> None: ...


class LeftOverFollower:
    """Gradients that no optimizer of zerox holds: a rank that has run out sends zeros, as with torch's class, and keeps
    its own p.grad as it is."""

    def __init__(self, grads: Grads, divide: str) -> None:
        self.grads = grads
        self.kept: list[tuple[Tensor, Tensor | None]] = []
        self._synchronizer.set_following(by_backward=True, by_active=divide == of_optimizers.ACTIVE)

    def begin(self) -> None:
        self.kept = [(m.param, m.param.grad) for bucket in self.grads.buckets for m in bucket.members]
        for param, _ in self.kept:
            param.grad = None  # the mean of each backward comes there

    def end(self) -> None:
        for param, grad in self.kept:
            param.grad = grad
        self._synchronizer.set_following(by_backward=False, by_active=False)

    def follow(self) -> C.SyncPoint:
        """Collective."""
        return self.grads.sync(C.SyncPoint.FOLLOW).sync_point

    @property
    def _synchronizer(self) -> C.Synchronizer:
        return self.grads.manager.synchronizer


class Following:
    """One join() of a wrapper, from where it is entered. Making one is collective."""

    def __init__(self, wrapper: Joined, divide: str, config: JoinConfig) -> None:
        self.to_wrapper = weakref.ref(wrapper)
        self.config = config
        self.joined = _joins_of(wrapper)
        if config.enable and not config.is_first_joinable and any(_leads(each) for each in self.joined):
            raise RuntimeError(
                "zerox.DistributedDataParallel: torch's Join was given an optimizer before the wrapper of its "
                "parameters, whose forward is the first that a rank does in a step: pass Join([ddp, optimizer])"
            )
        for each in self.joined:
            each.check()
        said = f"join(divide='{divide}', throw_on_early_termination={config.throw_on_early_termination})"
        check_same([said], wrapper.process_group, wrapper.device)
        wrapper._averaging.before_forward()
        if (unbucketed := wrapper._averaging.left_over.unbucketed) is not None:
            raise NotImplementedError(
                "zerox.DistributedDataParallel: join() can't follow rows and complex gradients that no optimizer of "
                f"zerox holds, as those of parameter {quote(*unbucketed.members[0])}: give tables to one in a param "
                "group with sparse=True, or freeze them"
            )
        left_over = wrapper._averaging.left_over.grads
        self.left_over = None if left_over is None else LeftOverFollower(left_over, divide)
        self.followers = Followers([*self.joined, *([self.left_over] if self.left_over else [])])
        of_optimizers.begin(self.joined, divide, together=True)
        for each in self.joined:
            each.is_wrapped = True

    # ---- of a rank that has batches

    def before_forward(self, sends: bool) -> None:
        """``sends``: the backward after it does. Collective. RuntimeError on all ranks if one has run out, and
        ``throw_on_early_termination`` was asked for."""
        wrapper = self.wrapper
        if self.left_over is not None and wrapper._averaging.left_over.grads is not self.left_over.grads:
            raise RuntimeError(
                "zerox.DistributedDataParallel: an optimizer took parameters inside join() that none held before, and "
                "a rank that follows can't know: build optimizers outside join()"
            )
        with C.Doing("DistributedDataParallel's forward inside join()", True), waiting(self.group):
            torch_join.Join.notify_join_context(wrapper)  # type: ignore[arg-type]
            if wrapper.will_sync_module_buffers():
                wrapper._hand_out_buffers(self._last_rank_with(True))
            dist.all_reduce(torch.full((1,), float(sends), device=wrapper.device), group=self.group, async_op=True)

    # ---- of one that has run out

    def start(self) -> None:
        """Follows optimizers and left-over gradients from now on."""
        if self.followers.threads:
            return
        if self.left_over is not None:
            self.left_over.begin()
        self.followers.start()

    def follow_forward(self) -> None:
        """One of the others."""
        self.start()
        wrapper = self.wrapper
        if wrapper.will_sync_module_buffers():
            wrapper._hand_out_buffers(self._last_rank_with(False))
        sends = torch.zeros(1, device=wrapper.device)
        self.await_(dist.all_reduce(sends, group=self.group, async_op=True))
        wrapper.require_forward_param_sync = bool(sends)

    def follow_to_end(self, is_last: bool) -> None:
        """All ranks have run out. ``is_last``: this one had most batches. All take the model of such a rank."""
        self.start()
        self.followers.wait()
        wrapper = self.wrapper
        wrapper._join_config = OFF
        wrapper.require_forward_param_sync = True  # ranks may have ended in other forwards
        wrapper._find_buffers()
        apart = [local_of(param) for _, param in wrapper._averaging.left_over.seen.apart]
        shared = wrapper.modules_buffers if wrapper.forward_sync_buffers else []
        if apart or shared:
            broadcast([*apart, *shared], self.group, "parameters and buffers", self._last_rank_with(is_last))
        for param in apart:
            torch.autograd.graph.increment_version(param)

    def await_(self, work: Any) -> None:
        """Raises meanwhile what following did: its ranks then come to no forward any more."""
        while not work.is_completed():
            self.followers.check()
            time.sleep(LOOK_EVERY_S)
        try:
            work.wait()
        except RuntimeError as error:
            # Where a rank is gone, the threads that follow are told why, if it could say so.
            until = time.monotonic() + FAILURE_RECORD_S
            while any(thread.is_alive() for thread in self.followers.threads) and time.monotonic() < until:
                self.followers.check()
                time.sleep(LOOK_EVERY_S)
            self.followers.check()
            raise RuntimeError(
                f"zerox: in DistributedDataParallel.join() a rank did not answer, see the other ranks' logs: {error}"
            ) from error

    # ---- of all

    def end(self) -> None:
        """The wrapper is outside again."""
        if self.left_over is not None:
            self.left_over.end()
        of_optimizers.end(self.joined)
        of_optimizers.note_outside(self)

    def leave(self, error: BaseException) -> None:
        """The others raise this rank's error, unless all ranks raise it."""
        ended_early = any(words in str(error) for words in (RAN_OUT, OTHER_RAN_OUT))
        if not (self.config.throw_on_early_termination and ended_early):
            leave(self.followers.followed, error)

    @property
    def wrapper(self) -> Joined:
        wrapper = self.to_wrapper()
        assert wrapper is not None
        return wrapper

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.wrapper.process_group
        assert group is not None
        return group

    def _last_rank_with(self, condition: bool) -> int:
        """Of those that pass True. Collective."""
        found = torch.tensor([self.group.rank() if condition else -1], device=self.wrapper.device)
        self.await_(dist.all_reduce(found, dist.ReduceOp.MAX, self.group, async_op=True))
        return int(found)


class Hook(torch_join.JoinHook):
    """What torch's Join calls."""

    def __init__(self, wrapper: Joins) -> None:
        self.wrapper = wrapper
        self.joined: Sequence[of_optimizers.Joining] = _joins_of(wrapper)
        of_optimizers.hooks_of_wrappers.add(self)

    def main_hook(self) -> None:
        if self.wrapper._following is not None:
            self.wrapper._following.follow_forward()

    def post_hook(self, is_last_joiner: bool) -> None:
        if self.wrapper._following is not None:
            self.wrapper._following.follow_to_end(is_last_joiner)


class Joins:
    """What a wrapper has for it."""

    _following: Following | None = None
    _divide = of_optimizers.ALL

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """For torch's ``Join([ddp])`` and ``Join([ddp, optimizer])``: follows the optimizers of the module, in the list
        or not, and gradients that no optimizer of zerox holds. The wrapper comes first."""
        check_join()
        hook = Hook(self)
        of_optimizers.check_outside(beside_wrappers=True)
        self._join_config = OFF  # torch's Join does not say so if its block raised
        self._divide = of_optimizers.divide_of(kwargs)
        return hook

    @property
    def _join_config(self) -> JoinConfig:
        return OFF if self._following is None else self._following.config

    @_join_config.setter
    def _join_config(self, config: JoinConfig) -> None:
        """torch's Join sets it where it begins."""
        before, self._following = self._following, None
        if before is not None:
            before.end()
        if config.enable and size_of(self.process_group) > 1:  # type: ignore[attr-defined]
            try:
                self._following = Following(self, self._divide, config)  # type: ignore[arg-type]
            except BaseException:
                for each in _joins_of(self):
                    each.leave_torchs()
                raise

    def _before_forward(self, sends: bool) -> None:
        """Buffers are handed out, where they are."""
        if self._following is not None:
            self._following.before_forward(sends)
        elif self.will_sync_module_buffers():  # type: ignore[attr-defined]
            self._hand_out_buffers()  # type: ignore[attr-defined]


class Join(AbstractContextManager[None]):
    """``with ddp.join():``, torch's Join of one wrapper, in which a rank that raises tells the others."""

    def __init__(self, wrapper: Joins, divide_by_initial_world_size: bool, throws: bool) -> None:
        of_optimizers.check_outside()
        self.hook = wrapper.join_hook(divide_by_initial_world_size=divide_by_initial_world_size)
        self.wrapper = wrapper
        self.throws = throws

    def __enter__(self) -> None:
        of_optimizers.check_outside()
        self.wrapper._join_config = JoinConfig(True, self.throws, True)
        assert self.wrapper._following is not None
        of_optimizers.note_inside(self.wrapper._following)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        following = self.wrapper._following
        assert following is not None
        try:
            if error is None:
                self._follow(following)
            else:
                following.leave(error)
        except BaseException as raised:
            following.leave(raised)
            raise
        finally:
            self.wrapper._join_config = OFF

    def _follow(self, following: Following) -> None:
        is_last = True
        if not self.throws:
            following.start()  # they hear of a rank that raises in its next step
        while self._sum(following, 0.0) > 0:
            is_last = False
            if self.throws:
                self._sum(following, 1.0)
                raise RuntimeError(f"Rank {following.group.rank()} {RAN_OUT}")
            self.hook.main_hook()
        self.hook.post_hook(is_last)

    @staticmethod
    def _sum(following: Following, number: float) -> float:
        """Over the ranks: each that has a batch says 1 in each forward."""
        found = torch.full((1,), number, device=following.wrapper.device)
        with C.Doing("DistributedDataParallel.join()", True), waiting(following.group):
            following.await_(dist.all_reduce(found, group=following.group, async_op=True))
        return float(found)


def _joins_of(wrapper: Any) -> list[of_optimizers.Joining]:
    """What join() has of the optimizers of a wrapper's module."""
    return [of_optimizers.joining_of(engine) for engine in engines_of(wrapper._averaging.wrapped.params)]


def _leads(joined: of_optimizers.Joining) -> bool:
    return joined.config.enable and joined.config.is_first_joinable
