"""What a gradient that has left can be asked through its placeholder in p.grad: norms, and whether it is finite.

The first question is answered for all gradients of the optimizer, in one small message, and its answers are kept while
the gradients are unchanged: torch's clip is one message, and a kept answer needs no other rank. Each norm is an exact
sum (csrc/math/exact_sum.h), with the same digits at every number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from zerox import _C as C
from zerox import _torch, ops
from zerox._C import Combine, SyncPoint, SyncResult
from zerox.calls.phases import Visit
from zerox.grads.asked import Asked
from zerox.grads.grad_operators import ALL_FINITE
from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.grads.norm import norm_of, total_limbs
from zerox.grads.placeholder import ShardedGrad
from zerox.memory.bucket import Bucket
from zerox.rows.rows import Rows

KEEP = (SyncPoint.STEP, SyncPoint.GRAD_NORM, SyncPoint.FULL_GRAD, SyncPoint.FOLLOW)  # calls that change no gradient


@dataclass
class Kept:
    """The answers to one question. ``norms``, ``finite``: float64, by the placeholder's number."""

    norms: Tensor
    finite: Tensor
    own_finite: Tensor  # of gradients that are each rank's own, a scalar
    to_give: dict[torch.dtype, list[Tensor | None]] = field(default_factory=dict)

    def norm(self, number: int, dtype: torch.dtype) -> Tensor:
        """A tensor of its own, as an operator's result is. To cut all at once takes a tenth of the time."""
        given = self.to_give.get(dtype)
        if given is None:
            given = self.to_give[dtype] = list(self.norms.to(dtype, copy=True).unbind())
        found, given[number] = given[number], None
        return self.norms[number].to(dtype, copy=True) if found is None else found


@dataclass(frozen=True, eq=False)
class Where:
    """Gradients are numbered over all buckets, as placeholders are, and this rank's segments are rows.

    ``sizes``: of the buckets. ``rows``: the first of each, and their number. ``own``: the gradient of each row.
    ``cut``: gradients of which several ranks have parts; ``own_cut``: which of these this rank has, with its row.
    """

    sizes: list[int]
    rows: list[int]
    own: Tensor
    cut: Tensor
    own_cut: list[tuple[int, int]]

    @property
    def num_buckets(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, buckets: Sequence[Bucket], device: torch.device) -> Where:
        sizes = [len(bucket.members) for bucket in buckets]
        rows = list(accumulate((len(bucket.own_segments) for bucket in buckets), initial=0))
        starts = list(zip(accumulate(sizes, initial=0), buckets, strict=False))
        own = [start + segment.slot for start, bucket in starts for segment in bucket.own_segments]
        cut = [start + slot for start, bucket in starts for slot in bucket.plan.layout.cut_slots]
        place = {number: at for at, number in enumerate(cut)}
        own_cut = [(place[number], row) for row, number in enumerate(own) if number in place]
        of_own, of_cut = (torch.tensor(each, dtype=torch.int64, device=device) for each in (own, cut))
        return cls(sizes, rows, of_own, of_cut, own_cut)


class GradAnswers:
    """What it is asked is collective, but for what is kept. ``buckets``: the core's own list, which grows.

    ``sync``: the core's. It is held weakly, as placeholders hold this object: they must not keep the optimizer.
    """

    def __init__(self, grads: Grads, grad_scale: GradScale, buckets: Sequence[Bucket], rows: Rows) -> None:
        self.grads = grads
        self.scale = grad_scale
        self.buckets = buckets
        self.rows = rows
        self.sync: Callable[[], Callable[..., SyncResult] | None] = _nobody
        self.watch: Callable[[], None] = _nobody  # has the next backward call forget(), before it adds to gradients
        self.where: Where | None = None
        self.kept: dict[float, Kept] = {}
        self.all_finite: Tensor | None = None
        self.count = 0  # rises when gradients are others
        self.num_added = self.num_done = -1

    def norm(self, grad: ShardedGrad, what: str, p: float, dtype: torch.dtype | None = None) -> Tensor:
        return self._keep(grad, what, p).norm(grad.number, dtype or grad.dtype)

    def is_finite(self, grad: ShardedGrad, what: str) -> Tensor:
        return self._keep(grad, what, 2.0).finite[grad.number] != 0.0

    def has_nan(self, grad: ShardedGrad, what: str) -> Tensor:
        return self._keep(grad, what, 2.0).norms[grad.number].isnan()

    def knows(self, plain: Sequence[Tensor]) -> bool:
        """Whether these gradients, which have values here, are the rank's own."""
        operators = self.grads.operators
        return operators is not None and operators.own.has_values(plain)

    def unscale(self, grads: Sequence[ShardedGrad], found_inf: Tensor, inverse_scale: Tensor) -> None:
        """As ``torch._amp_foreach_non_finite_check_and_unscale_``: the same ``found_inf`` on all ranks."""
        what = "GradScaler.unscale_()"
        placeholders = self.grads.placeholders
        if len(grads) == sum(each.is_set for each in placeholders):
            if self.all_finite is None or any(grad.answered != self.count for grad in grads):
                self._ask(grads[0], what, ALL_FINITE)
            assert self.all_finite is not None
            finite = self.all_finite
        else:
            kept = [self._keep(grad, what, 2.0) for grad in grads]
            each = [one.finite[grad.number] for one, grad in zip(kept, grads, strict=True)]
            finite = torch.stack([*each, kept[0].own_finite]).amin()
        found_inf.copy_(torch.maximum(found_inf, (1.0 - finite).to(found_inf).reshape(found_inf.shape)))
        for grad in grads:
            assert grad.notes is not None
            grad.notes.note(grad, "mul_", (inverse_scale,))

    def take_part(self, result: SyncResult) -> None:
        """On all ranks, once they have synchronized for a question."""
        operators = self.grads.operators
        assert operators is not None
        if self.num_done != operators.notes.count:
            self.forget()
            self.num_done = operators.notes.count
        p = result.arguments[0]
        if p == ALL_FINITE:
            of_rows = self.rows.limbs(2.0)
            limbs = total_limbs(self.grads, 2.0, Asked(self.buckets), self.scale.divisors, of_rows, self.scale.values)
            finite = norm_of([(each, None) for each in limbs], 2.0)[1]
            self.all_finite = finite * self._own_finite(finite)
        else:
            norms, finite = self._norms(p)
            self.kept[p] = Kept(norms, finite, self._own_finite(finite.new_ones(())))
        self.num_added = self.grads.manager.synchronizer.num_added
        for each in operators.placeholders:
            each.answered = self.count
        self.watch()

    def note_call(self, visit: Visit) -> None:
        """Where ranks have synchronized: what was answered before a step is what it updated from. A rank that follows
        has not seen what the others did to p.grad."""
        result = visit.result
        has_new = self.num_added != self.grads.manager.synchronizer.num_added
        if result.sync_point not in KEEP or has_new or (result.followed and result.operators):
            self.forget()

    def forget(self) -> None:
        """Gradients are others now."""
        self.kept.clear()
        self.all_finite = None
        self.count += 1

    # ---- inside

    def _own_finite(self, like: Tensor) -> Tensor:
        operators = self.grads.operators
        assert operators is not None
        return operators.own.are_finite(like, self.grads.all_reduce)

    def _keep(self, grad: ShardedGrad, what: str, p: float) -> Kept:
        kept = self.kept.get(p)
        if kept is None or grad.answered != self.count:
            self._ask(grad, what, p)
            kept = self.kept[p]
        return kept

    def _ask(self, grad: ShardedGrad, what: str, p: float) -> None:
        if not grad.is_set or _torch.in_backward():
            why = "inside a backward: ranks synchronize for it, so ask after it"
            why = why if grad.is_set else "after that gradient was discarded: ask p.grad"
            raise RuntimeError(f"zerox: {what} of the gradient of parameter {grad.quoted} was called {why}")
        call = f"{what} of the gradient of parameter '{grad.param_name}'"  # to look for the model's would take long
        sync = self.sync()
        assert sync is not None
        with C.Doing(call, False), torch.no_grad():
            self.take_part(sync(SyncPoint.GRAD_NORM, [p], self._refusal(what, p)))

    def _refusal(self, what: str, p: float) -> str:
        grads = self.grads
        way_out = "use zerox.GradScaler" if p == ALL_FINITE else "call optimizer.clip_grad_norm_()"
        if self.rows.each:
            return f"{what} of p.grad does not go with sparse=True in a param group: {way_out}"
        if grads.subgroups.are_many and p != ALL_FINITE:
            return f"{what} of p.grad does not go with a param group's process_group: {way_out}"
        if grads.dtensors and p != ALL_FINITE:
            return f"{what} of p.grad does not go with DTensors: {way_out}"
        assert grads.operators is not None
        if (local := grads.operators.look()) is not None:
            return (
                f"the gradient of parameter {local.quoted} has not left yet, and {what} of p.grad would be of this "
                "rank's own: call optimizer.synchronize() first"
            )
        return ""

    def _norms(self, p: float) -> tuple[Tensor, Tensor]:
        """Of each gradient as step() will see it, and 1 if it is finite, else 0. Collective."""
        grads, device = self.grads, self.grads.ranks.device
        combine = Combine.MAX if math.isinf(p) else Combine.SUM
        if self.where is None or self.where.num_buckets != len(self.buckets):
            self.where = Where.of(self.buckets, device)
        where = self.where
        limbs = torch.zeros(where.rows[-1], ops.EXACT_LIMBS, dtype=torch.int64, device=device)
        for index in range(where.num_buckets):
            for part in grads.parts(index):
                row = where.rows[index] + part.first_row
                ops.norm_(limbs[row : row + part.segments.shape[0]], part.grad, part.segments, p, part.mask)
        # What one rank has alone travels as its norm, in two numbers, and the others as exact sums.
        whole = torch.zeros(sum(where.sizes), 2, dtype=torch.float64, device=device)
        whole[where.own] = _or_not_finite(ops.norm_value(limbs, p))
        whole[where.cut] = 0.0
        sums = limbs.new_zeros(len(where.cut), ops.EXACT_LIMBS)
        for at, row in where.own_cut:
            sums[at] = limbs[row]
        message = torch.cat([whole.view(torch.int64).flatten(), sums.flatten()])
        grads.all_reduce(message, combine)
        whole = message[: whole.numel()].view(torch.float64).reshape(whole.shape)
        whole[where.cut] = _or_not_finite(ops.norm_value(message[whole.numel() :].reshape(sums.shape), p))
        factors = self.scale.factors(where.sizes)
        norms, finite = whole[:, 0], 1.0 - whole[:, 1]
        if factors is None:
            return norms.clone(), finite
        return norms * factors.abs(), finite * factors.isfinite()


def _or_not_finite(values: Tensor) -> Tensor:
    """``norm_value()``'s, with 0 for finite, as it is where a rank has nothing."""
    values[:, 1] = 1.0 - values[:, 1]
    return values


def _nobody() -> None:
    return None
