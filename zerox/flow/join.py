"""Ranks with unequal numbers of batches: one that has run out follows the others: Note [Followers] in meetings.h."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join

from zerox._C import Meeting, Outcome
from zerox.flow.grads import Grads
from zerox.memory.shared import Shared
from zerox.memory.torch_optimizer import TorchOptimizer
from zerox.ranks.roll_call import summary_of

ALL, ACTIVE = "all", "active"
STEP_ENDS = (Meeting.STEP, Meeting.SKIP_STEP)


class Joinable(TorchOptimizer):
    """What join() needs of an optimizer; for torch's Join, a ``torch.distributed.algorithms.Joinable`` too."""

    _grads: Grads
    _joining = Shared[str | None](None)  # inside join(): its ``divide``
    _notified = Shared[bool](False)  # torch's Join knows of this step
    _by_active = Shared[bool](False)  # p.grad is a mean over the active ranks: see Following in meetings.h
    _is_wrapped = Shared[bool](False)  # a wrapper inside join() follows it
    _join_config = Shared[torch_join._JoinConfig](torch_join._JoinConfig.construct_disabled_join_config())

    def _set_joining(self, divide: str | None) -> None:
        """This is inside a join() with this ``divide``, or outside."""
        raise NotImplementedError

    def _follow(self) -> Meeting:
        """Meets the others in their next call, and takes part in it; Meeting.FOLLOW if all ranks follow."""
        raise NotImplementedError

    def join(self, divide: str = ALL) -> Join:
        raise NotImplementedError

    # ---- torch's protocol

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """``divide_by_initial_world_size=False`` among Join's arguments is ``divide="active"`` of join()."""
        self.join()  # raises if it can't be
        end([self])  # torch's Join does not say so if its block raised
        begin([self], divided_by(kwargs), together=_has_wrapper(self))
        to_self = weakref.ref(self)

        def before_backward_end() -> None:
            optimizer = to_self()
            if optimizer is not None:
                optimizer._notify()

        self._grads.manager.settlement.set_before_backward_end(before_backward_end)
        return FollowHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._grads.ranks.device

    @property
    def join_process_group(self) -> Any:
        return self._grads.ranks.given or dist.group.WORLD

    def _notify(self) -> None:
        """Once a step, before ranks meet: ranks in torch's Join wait for this before they follow."""
        if self._join_config.enable and not self._notified:
            self._notified = True
            torch_join.Join.notify_join_context(self)  # type: ignore[arg-type]

    def _end_notice(self) -> None:
        """A step is over."""
        self._notified = False


torch_join.Joinable.register(Joinable)


class HookOfWrapper(Protocol):
    optimizers: Sequence[Joinable]  # that it follows


# For torch's Join, which makes the hooks of all that it is given before it begins.
hooks_of_wrappers: weakref.WeakSet[HookOfWrapper] = weakref.WeakSet()


def divided_by(kwargs: Mapping[str, Any]) -> str:
    """The ``divide`` of join() that torch's Join asks for."""
    return ALL if kwargs.get("divide_by_initial_world_size", True) else ACTIVE


def begin(optimizers: Sequence[Joinable], divide: str, together: bool = False) -> None:
    """``together``: with a wrapper in torch's Join, which does not say so if its block raises."""
    if divide not in (ALL, ACTIVE):
        raise ValueError(f"divide must be {ALL!r} or {ACTIVE!r}, got {divide!r}")
    if not together:
        check_outside()
        for optimizer in optimizers:
            note_inside(optimizer)
    for optimizer in optimizers:
        optimizer._set_joining(divide)


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


def _has_wrapper(optimizer: object) -> bool:
    return any(optimizer in each.optimizers for each in hooks_of_wrappers)


def end(optimizers: Sequence[Joinable]) -> None:
    for optimizer in optimizers:
        optimizer._set_joining(None)
        optimizer._is_wrapped = False
        note_outside(optimizer)


class _Inside(threading.local):
    """What this thread is inside a join() with: optimizers, and what a wrapper's is."""

    def __init__(self) -> None:
        self.each: weakref.WeakSet[object] = weakref.WeakSet()


_inside = _Inside()


class FollowHook(torch_join.JoinHook):
    def __init__(self, optimizer: Joinable) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """One step of the others, unless a wrapper beside it in Join follows all of them."""
        while not self.optimizer._is_wrapped and self.optimizer._follow() not in (Meeting.FOLLOW, *STEP_ENDS):
            pass

    def post_hook(self, is_last_joiner: bool) -> None:
        leave_torchs(self.optimizer)


def leave_torchs(optimizer: Joinable) -> None:
    """It is outside of torch's Join again."""
    end([optimizer])
    optimizer._end_notice()
    optimizer._join_config = torch_join._JoinConfig.construct_disabled_join_config()
    optimizer._grads.manager.settlement.set_before_backward_end(None)


class Join(AbstractContextManager[None]):
    """See ``optimizer.join()``, and :func:`join` for several optimizers."""

    def __init__(self, optimizers: Sequence[Joinable], divide: str) -> None:
        self.optimizers = optimizers
        self.divide = divide

    def __enter__(self) -> None:
        begin(self.optimizers, self.divide)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                follow(self.optimizers)
            else:
                leave(self.optimizers, error)
        finally:
            end(self.optimizers)


def join(optimizers: Joinable | Iterable[Joinable], divide: str = ALL) -> Join:
    """``with zerox.join([one, another]):`` as ``optimizer.join()``, for several optimizers in one loop."""
    given = [optimizers] if isinstance(optimizers, Joinable) else list(optimizers)
    for optimizer in given:
        optimizer.join(divide)  # raises if it can't be
    return Join(given, divide)


class Followed(Protocol):
    """What an optimizer has, and what else ranks follow."""

    _grads: Grads

    def _follow(self) -> Meeting: ...


class Followers:
    """A thread for each, since the others call them in any order. They end when all ranks follow."""

    def __init__(self, followed: Sequence[Followed]) -> None:
        self.followed = followed
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, first: int = 0) -> None:
        """All but the ``first``."""
        self.threads = [
            threading.Thread(target=self.run, args=(each,), name="zerox follows") for each in self.followed[first:]
        ]
        for thread in self.threads:
            thread.start()

    def run(self, one: Followed) -> None:
        device = one._grads.ranks.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                while one._follow() != Meeting.FOLLOW:
                    pass
            except BaseException as error:
                self.errors.append(error)
                leave(self.followed, error)

    def wait(self) -> None:
        """Raises what one of them raised first."""
        for thread in self.threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """The same, without waiting."""
        if self.errors:
            raise self.errors[0]


def follow(optimizers: Sequence[Joinable]) -> None:
    """Until all ranks do."""
    followers = Followers(optimizers)
    followers.start(first=1)
    followers.run(optimizers[0])
    followers.wait()


def leave(followed: Iterable[Followed], error: BaseException) -> None:
    """The others raise this rank's error."""
    for each in followed:
        ranks = each._grads.ranks
        if ranks.whereabouts is not None:
            ranks.whereabouts.leave(f"rank {ranks.rank} raised {summary_of(error)} inside optimizer.join()")


def options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers in the param groups, which step() reads."""
    return [{key: value for key, value in group.items() if _is_number(value)} for group in groups]


def digest_of(groups: Sequence[dict[str, Any]], divide: str) -> float:
    """Of these numbers and join()'s ``divide``: the same in every process, and not 0."""
    found = hash((divide == ACTIVE, *(tuple(group.values()) for group in options_of(groups))))
    return float(1 + found % (2**52))


def take_options(optimizer: Joinable, outcome: Outcome, follows: bool) -> None:
    """Where ranks' options differ, a follower takes those of the others. Collective. RuntimeError if these differ."""
    ranks = optimizer._grads.ranks
    own = (optimizer._joining, None if follows else options_of(optimizer.param_groups))
    said = [pickle.loads(each) for each in ranks.all_gather_bytes(pickle.dumps(own))]
    for rank, (joining, options) in enumerate(said):
        if joining != said[outcome.speaker][0]:
            raise RuntimeError(
                f"zerox: rank {rank} is inside join(divide={joining!r}) and rank {outcome.speaker} inside "
                f"join(divide={said[outcome.speaker][0]!r}): all ranks must be inside the same (None: outside)"
            )
        if options not in (None, said[outcome.speaker][1]):
            raise RuntimeError(
                "zerox: in step() ranks have param groups with different options, such as lr; set them alike: rank "
                f"{rank} has {options}, rank {outcome.speaker} has {said[outcome.speaker][1]}"
            )
    if follows:
        for group, options in zip(optimizer.param_groups, said[outcome.speaker][1], strict=True):
            group.update(options)


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(each) for each in value)
    return isinstance(value, bool | int | float)
