"""Gradients of a wrapped module that no optimizer of zerox holds: averaged whole, into ``p.grad``, as with DDP.

Note [Left-over gradients]
A bucket manager of its own sends them, as in ZeRO stage 1, over a group of its own, and nothing is updated. Ranks
synchronize where a backward ends. One that reached none of these parameters has to come too, so the forward's outputs
have hooks that say that a backward has begun. Which parameters are left over is looked at in each training forward,
since ranks make the bucket manager together: an optimizer may be built, deleted, or given more parameters at any time.
An optimizer that takes one of them ends the bucket manager at once (let_go), and the next forward makes another one.
Gradients that fit in no bucket wait for that sync point: see Note [Gradients outside buckets].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zerox._C import BucketManager
from zerox.grads.grads import Grads
from zerox.memory.bucket import Member, describe, segment_table
from zerox.memory.flat import dense_strides
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.model_names import quote
from zerox.options import PARAM_DTYPES, OptimizerOptions, Planned
from zerox.plan.buckets import BucketPlan
from zerox.plan.layout import Layout
from zerox.plan.stage import stage_of
from zerox.ranks.calls import warn_caller
from zerox.ranks.dtensors import is_dtensor
from zerox.ranks.group import Ranks, call_ranks, find_ranks
from zerox.ranks.holders import averaging, find_held, note_change, num_changes
from zerox.ranks.wrapped import WrappedModule
from zerox.wrapper.unbucketed import Unbucketed, tables_in

WAY_OUT = "give it to an optimizer of zerox, freeze it, or name it in _ddp_params_and_buffers_to_ignore"


class InPlace:
    """Parameters that stay where they are: a FlatBuffer's kin."""

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self.params = list(params)
        self.layout = layout
        self.flat = torch.empty(0, dtype=params[0].dtype, device=params[0].device)

    def home(self, slot: int) -> Tensor:
        param = self.params[slot].detach()
        strides = dense_strides(param)
        if param.stride() == strides:
            return param
        return torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device)


class LeftOverBucket:
    """What a bucket manager needs of a bucket whose parameters are not updated here."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], rank: int) -> None:
        self.plan = plan
        self.members = list(members)
        self.buffer = InPlace([member.param for member in members], plan.layout)
        self.mask = None
        self.segments = segment_table(plan.layout.segments(rank), self.members).to(self.buffer.flat.device)

    @cached_property
    def grad_dtype(self) -> torch.dtype:
        return grad_dtype_of(self.members[0].param)

    def describe(self, index: int) -> str:
        return f"left-over {describe(index, self.members)}"


@dataclass
class Seen:
    """What the last look found, when optimizers had changed so often: the parameters that none of them holds."""

    num_changes: int = -1
    apart: tuple[tuple[str, Tensor], ...] = ()


class LeftOver:
    """Of one wrapper. ``reduce_dtype``: as an optimizer's."""

    def __init__(self, wrapped: WrappedModule) -> None:
        self.wrapped = wrapped
        self.reduce_dtype: torch.dtype | None = None
        self.ranks: Ranks | None = None  # once there were any
        self.grads: Grads | None = None
        self.unbucketed: Unbucketed | None = None
        self.sent: tuple[int, ...] = ()  # ids of the parameters that it sends
        self.seen = Seen()
        self.has_ended = False
        averaging.add(self)
        weakref.finalize(self, note_change).atexit = False  # another wrapper of the same parameters may go on

    def before_forward(self, joins: bool = False) -> None:
        """To be called in each training forward. Collective where other parameters than before are left over.
        RuntimeError for these inside join() (``joins``), where a rank that follows takes no part in that."""
        if self.has_ended:
            return
        if self.grads is not None and self.grads.manager.backward.has_failed:
            self._forget_failed()
        self._look()
        if not self.seen.apart:
            return
        known = set(self.sent)
        if any(param.requires_grad and id(param) not in known for _, param in self.seen.apart):
            if joins:
                raise RuntimeError(
                    "zerox.DistributedDataParallel: inside join() other parameters than before are held by no optimizer"
                    f" of zerox, such as {self._first_new(known)}, and a rank that follows can't know: thaw parameters,"
                    " build optimizers and delete them outside join()"
                )
            # Those that were frozen meanwhile stay: a GAN's would come and go in each step.
            self._send([each for each in self.seen.apart if each[1].requires_grad or id(each[1]) in known])

    def send_in(self, reduce_dtype: torch.dtype | None) -> None:
        self.reduce_dtype = reduce_dtype
        self._stop()

    def let_go(self, taken: set[int]) -> None:
        if not taken.isdisjoint(self.sent):
            self._stop()

    def end(self) -> None:
        """Nothing is averaged here any more. Another wrapper of the module may take over."""
        self.has_ended = True
        self._stop()
        note_change()

    @property
    def managers(self) -> list[BucketManager]:
        """Those that a backward is about to begin for."""
        return [] if self.grads is None else [self.grads.manager]

    # ---- inside

    def _stop(self) -> None:
        self.grads, self.unbucketed, self.sent, self.seen = None, None, (), Seen()

    def _look(self) -> None:
        if self.seen.num_changes == num_changes():
            return
        known = find_held() | {number for each in list(averaging) if each is not self for number in each.sent}
        apart = tuple((name, param) for name, param in self.wrapped.params.items() if id(param) not in known)
        self.seen = Seen(num_changes(), apart)

    def _send(self, trained: Sequence[tuple[str, Tensor]]) -> None:
        self.grads = self.unbucketed = None  # their hooks are gone before others come
        self.sent = tuple(id(param) for _, param in trained)
        if not self.sent or self.wrapped.group is None or self.wrapped.group.size() == 1:
            return
        tables = tables_in(self.wrapped.to_module())
        apart = [each for each in trained if id(each[1]) in tables or each[1].is_complex()]
        check_fit(trained, apart, self.reduce_dtype)
        device = trained[0][1].device
        if self.ranks is None:
            with call_ranks(self.wrapped.group) as roll_call:
                self.ranks = find_ranks(self.wrapped.group, device, roll_call, has_state=False)
        options = OptimizerOptions(stage=1, reduce_dtype=self.reduce_dtype)
        known = {id(param) for _, param in apart}
        self.ranks.check_same([_line(name, param, id(param) in known) for name, param in trained])
        trained = [each for each in trained if id(each[1]) not in known]
        plans = options.plan([Planned(*each) for each in trained], self.ranks.backend, self.ranks.size)
        self.grads = Grads(self.ranks, stage_of(1), self.reduce_dtype)
        for plan in plans:
            members = [Member(*trained[i], group=0, number=i) for i in plan.params]
            self.grads.add_bucket(LeftOverBucket(plan, members, self.ranks.rank))  # type: ignore[arg-type]
        decision = self.wrapped.decision
        self.grads.let_decide(dict.fromkeys(self.sent, decision))
        if apart:
            self.unbucketed = Unbucketed(self.ranks, self.grads.manager, apart, decision, self.reduce_dtype)

    def _first_new(self, known: set[int]) -> str:
        return next(quote(name, param) for name, param in self.seen.apart if id(param) not in known)

    def _forget_failed(self) -> None:
        assert self.grads is not None
        first = self.seen.apart[0][0]
        warn_caller(
            f"zerox: the last backward raised, here or on another rank: the gradients of '{first}' and all that no "
            "optimizer of zerox holds are discarded"
        )
        self.grads.zero(set_to_none=True)
        if self.unbucketed is not None:
            self.unbucketed.forget()


def check_fit(
    trained: Iterable[tuple[str, Tensor]], apart: Iterable[tuple[str, Tensor]], reduce_dtype: torch.dtype | None
) -> None:
    """NotImplementedError or ValueError for parameters whose gradients can't be averaged so. ``apart``: those of them
    that are in no bucket."""
    known = {id(param) for _, param in apart}
    first: Tensor | None = None
    for name, param in trained:
        first = param if first is None else first
        if is_dtensor(param):
            raise NotImplementedError(
                f"zerox.DistributedDataParallel: the gradient of DTensor {quote(name, param)} is held by no optimizer "
                f"of zerox, and only these average gradients of DTensors: {WAY_OUT}"
            )
        if (param.dtype not in PARAM_DTYPES and id(param) not in known) or param.device != first.device:
            raise ValueError(
                f"zerox.DistributedDataParallel: parameter {quote(name, param)} in {param.dtype} on {param.device} is "
                f"held by no optimizer of zerox; gradients are averaged of {[str(each) for each in PARAM_DTYPES]} and "
                f"complex ones, on one device ({first.device}): {WAY_OUT}"
            )
        if param.is_complex() and reduce_dtype is not None:
            raise ValueError(
                f"zerox.DistributedDataParallel: parameter {quote(name, param)} in {param.dtype} can't be sent in "
                f"{reduce_dtype}: register no communication hook, or {WAY_OUT}"
            )


def _line(name: str, param: Tensor, is_apart: bool) -> str:
    how = f", averaged in {param.dtype} where a backward ends" if is_apart else ""
    return f"parameter '{name}' of shape {tuple(param.shape)}{how}"
