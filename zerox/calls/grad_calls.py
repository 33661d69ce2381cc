"""What the training loop may ask of the mean gradient between backward and step().

Each method here is what a call does after ranks have synchronized (csrc/grads/sync_points.h), so that a rank that
follows the others can do the same: see join.py. What the follower can't know comes with the result, or from its
``speaker``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerox._C import Combine, SyncPoint, SyncResult
from zerox.calls.grad_answers import GradAnswers
from zerox.calls.shard_writer import ShardWriter
from zerox.grads.asked import Asked, find_by_number
from zerox.grads.grad_operators import ALL
from zerox.grads.grad_scale import Divisor, GradScale, Norm
from zerox.grads.grads import Grads
from zerox.grads.norm import check_finite, clip_coefficient, norm_of, order_of, total_limbs
from zerox.memory.bucket import Bucket, Member
from zerox.params.unwrapped_params import OwnParams
from zerox.plan.plan import TablePlan
from zerox.rows.row_refusals import zero_grads
from zerox.rows.rows import Rows
from zerox.rules.of_groups import Rules

READ_THE_MEAN = (
    SyncPoint.STEP,
    SyncPoint.CLIP,
    SyncPoint.CLIP_TOGETHER,
    SyncPoint.UNSCALE,
    SyncPoint.GRAD_NORM,
    SyncPoint.FULL_GRAD,
)
# Where rows of tables are exchanged: the mean must have been reduced before it can be scaled.
NEED_ROWS = (*READ_THE_MEAN, SyncPoint.MEAN_OVER, SyncPoint.SCALE_GRADS, SyncPoint.CLIP_VALUE, SyncPoint.SYNCHRONIZE)
ERROR_IF_NONFINITE = 1  # in the last argument of a clip; the rest of it is twice Asked.number


@dataclass
class Record:
    """What was seen of the steps so far. ``norm``: of the last step's whole gradient; None if nobody asked for it."""

    num_steps: int = 0
    has_looked: bool = False  # at the parameters, since state was loaded: see Note [The first look]
    num_skipped: int = 0  # by a scaler
    norm: Tensor | None = None


class GradCalls:
    """``buckets``: the core's own list, which grows. Where ``p.grad`` is whole, factors go into it at once."""

    def __init__(
        self,
        grads: Grads,
        grad_scale: GradScale,
        buckets: Sequence[Bucket],
        own: OwnParams,
        shards_params: bool = False,
    ) -> None:
        self.grads = grads
        self.own = own
        self.scale = grad_scale
        self.buckets = buckets
        self.record = Record()
        self.row_grads = Rows(grads.ranks, grads.model, shows_mean=not grads.sharded, shards_tables=shards_params)
        self.writer = ShardWriter(grads, grad_scale, buckets)
        self.answers = GradAnswers(grads, grad_scale, buckets, self.row_grads)
        if grads.operators is not None:
            grads.operators.to_answers, grads.operators.own = weakref.ref(self.answers), own
            grads.operators.notes.on_first = self.answers.watch = partial(_watch, weakref.ref(self))

    # ---- before ranks synchronize

    def refusal(self, call: str) -> str:
        """Why ``call`` can't be made at this point of the step; empty if it can."""
        if why := self.own.refusal(call):
            return why
        requested = self.scale.requested
        if requested.limit is not None:
            return f"{call} was called after clip_grad_value_(), which comes last: it cuts gradients that are scaled"
        if call == "mean_over()" and requested.mean_over:
            return "mean_over() was called twice in one step: pass it this rank's whole count, once"
        if call == "mean_over()" and requested.clip:
            return f"mean_over() was called after {requested.clip}: the norm was of another mean"
        return ""

    def refusal_to_multiply(self, unfrozen: Sequence[Member] = ()) -> str:
        """The same of what was done to placeholders in p.grad: see grad_operators.py."""
        operators = self.grads.operators
        if operators is None or not (operators.is_any or self.scale.requested.by_operators):
            return ""
        there = operators.look()
        local = (*(m for m in unfrozen if m.param.grad is not None), there)
        first = next((each for each in local if each is not None), None)
        if operators.present and first is not None:
            return (
                f"the gradient of parameter {first.quoted} has not left yet, and those that have were changed "
                "through p.grad: call optimizer.synchronize() before you change p.grad"
            )
        if not (chains := operators.chains()):
            return ""
        call = f"p.grad.{next(iter(chains.values()))[0].name}()"
        if self.row_grads.each:
            return f"{call} does not go with sparse=True in a param group: call scale_grads_()"
        if ALL not in chains and (self.grads.subgroups.are_many or self.grads.partial.buckets):
            which = "DTensors" if self.grads.partial.buckets else "a param group's process_group"
            return f"{call} does not go with {which}, but for one factor for all: call scale_grads_()"
        return self.refusal(call)

    def before_backward(self) -> None:
        """The next gradients are about to be added to those that there are. On autograd's thread."""
        if refusal := self.refusal_to_multiply():
            raise RuntimeError(f"zerox: {refusal}")
        self.writer.fold()
        self.answers.forget()

    def pack_rows(self, sync_point: SyncPoint) -> str:
        """Readies the gradients of tables to be exchanged there, and what ranks tell each other of them. Returns why
        they can't be; empty if they can."""
        if not self.row_grads.each or sync_point not in NEED_ROWS:
            return ""
        why = self.row_grads.refusal()
        self.grads.manager.synchronizer.set_piggyback(self.row_grads.piggyback)
        return why

    def take_tables(
        self,
        planned: Sequence[tuple[Member, TablePlan]],
        groups: Sequence[Mapping[str, Any]],
        rules: Rules,
        divisors: Sequence[Divisor],
    ) -> None:
        """Collective."""
        self.row_grads.take(planned, groups, rules, divisors)
        for divisor in self.row_grads.divisors:
            self.scale.know(divisor)
        if self.row_grads.each:  # on all ranks, who say as much from now on
            self.grads.manager.synchronizer.set_piggyback(self.row_grads.piggyback)

    @staticmethod
    def clip_arguments(max_norm: float, norm_type: float, error_if_nonfinite: bool, asked: Asked) -> list[float]:
        flags = (ERROR_IF_NONFINITE if error_if_nonfinite else 0) + 2 * asked.number
        return [float(max_norm), order_of(norm_type), float(flags)]

    def zero(self, frozen: Sequence[Member], set_to_none: bool) -> None:
        """Of zero_grad(), what is not in buckets. ``frozen``: parameters that have no gradient of ours."""
        self.scale.reset()
        self.answers.forget()
        self.own.zero(set_to_none)
        if frozen or self.row_grads.each:
            zero_grads([*frozen, *(table.member for table in self.row_grads.tables)], set_to_none)
            self.row_grads.flow.forget()

    # ---- after it

    def clip(self, result: SyncResult, asked: Asked | None = None) -> Tensor:
        """``asked``: None on a rank that follows."""
        max_norm, p, flags = result.arguments
        if asked is None or (int(flags) > 1 and result.followed):
            asked = self._receive_asked(result, asked, is_some=int(flags) > 1)
        norm, finite = self.norm(p, asked)
        if asked.has_all and self.own.are_some:
            norm, finite = self.own.norm_beside(norm, finite, p, self.grads.all_reduce)
        total = norm.to(self.norm_dtype)
        if asked.has_all:
            self.note_norm(total, p)
        if int(flags) & ERROR_IF_NONFINITE:
            check_finite(total, finite, p)
        if max_norm != math.inf:
            self.shrink(clip_coefficient(total, max_norm), asked)
            self.scale.requested.clip = "clip_grad_norm_()"
        return total

    def norm(self, p: float, asked: Asked) -> tuple[Tensor, Tensor]:
        """The norm as step() will see it, and whether all elements are finite, as float64 scalars. Collective."""
        return norm_of(self.rows(p, asked), p)

    def rows(self, p: float, asked: Asked) -> list[tuple[Tensor, Tensor | None]]:
        """What the norm is of: see norm_of(). Collective."""
        of_rows = self.row_grads.limbs(p) if asked.has_all else ()
        limbs = total_limbs(self.grads, p, asked, self.scale.divisors, of_rows, self.scale.values)
        values = list(self.scale.values.values()) or [None]
        return list(zip(limbs, values, strict=True))

    def clip_together(self, result: SyncResult, coefficient: Tensor | None = None) -> None:
        """The rest of zerox.clip_grad_norm_(), once the norm is known; on a rank that follows, all of it."""
        if coefficient is None:
            self.rows(result.arguments[0], Asked(self.buckets))
            if result.arguments[1] == math.inf:
                return
            coefficient = torch.empty((), dtype=torch.float64, device=self.grads.ranks.device)
        if result.followed:
            coefficient = coefficient.double().reshape(1)
            self.grads.ranks.broadcast(coefficient, "the scale of the gradients", root=result.speaker)
            coefficient = coefficient.reshape(())
        self.shrink(coefficient, Asked(self.buckets))
        self.scale.requested.clip = "zerox.clip_grad_norm_()"

    def shrink(self, coefficient: Tensor, asked: Asked) -> None:
        """Has step() multiply by it, or for some parameters only, multiplies at once, as torch would."""
        if asked.has_all:
            self.scale.multiply(coefficient)
            self.own.multiply(coefficient)
            return
        slots = {index: found for index in range(len(self.buckets)) if (found := asked.slots_of(index))}
        if self.grads.sharded:
            self.writer.multiply(slots, coefficient)
        else:
            for index, of_bucket in slots.items():
                self.grads.manager.grads.scale(index, coefficient, of_bucket)
        self.scale.mark()

    def mean_over(self, result: SyncResult, count: float | Tensor = 0) -> None:
        ranks = self.grads.ranks
        if isinstance(count, Tensor):
            total = count.detach().reshape(()).to(ranks.device, torch.float64, copy=True)
        else:
            total = torch.full((), float(count), dtype=torch.float64, device=ranks.device)
        self.grads.all_reduce(total, Combine.SUM)
        self._multiply({divisor: self._over(total, divisor) for divisor in self.scale.values})
        self.scale.requested.mean_over = True

    def _over(self, total: Tensor, divisor: Divisor) -> Tensor:
        """What a sum that was divided by ``divisor`` is multiplied by, to be divided by ``total`` instead."""
        divided_by = self.grads.ranks.size if divisor is None else divisor
        if divisor is None and self.scale.requested.num_active is not None:
            divided_by = self.scale.requested.num_active
        factor = divided_by / (total + (total == 0)) * (total != 0)
        return factor + 0.0 * total.sqrt()  # NaN for a negative total, which the host has not seen

    def multiply(self, result: SyncResult, factor: Tensor | None = None) -> None:
        """By ``factor``; None: by the number that ranks told each other, or the speaker's."""
        factor = self._factor(result, factor)
        self._multiply(dict.fromkeys(self.scale.values, factor))
        self.own.multiply(factor)

    def _factor(self, result: SyncResult, factor: Tensor | None) -> Tensor:
        device, number = self.grads.ranks.device, result.arguments[0]
        if device.type == "cpu" or not math.isnan(number):
            return torch.full((), number, dtype=torch.float64, device=device)
        if result.followed:
            told = torch.zeros(1, dtype=torch.float64, device=device) if factor is None else factor.double().reshape(1)
            self.grads.ranks.broadcast(told, "the factor of the gradients", root=result.speaker)
            return told.reshape(())
        assert factor is not None
        return factor

    def skip(self, result: SyncResult | None = None) -> None:
        self.scale.reset()
        self.record.num_skipped += 1

    def end_step(self) -> None:
        norm = self.scale.requested.norm
        still_holds = norm is not None and norm.num_added == self.grads.manager.synchronizer.num_added
        self.record.norm = norm.value if norm is not None and still_holds else None
        self.record.num_steps += 1
        self.scale.end_step()

    def note_norm(self, total: Tensor, p: float) -> None:
        if p == 2.0:
            self.scale.requested.norm = Norm(total, self.grads.manager.synchronizer.num_added)

    def divide_by_active(self, result: SyncResult) -> None:
        """Has a mean over all ranks become one over those that had batches; once a step."""
        size = self.grads.ranks.size
        if self.scale.requested.num_active is None and not self.scale.requested.mean_over and result.num_active < size:
            factor = torch.full((), size / result.num_active, dtype=torch.float64, device=self.grads.ranks.device)
            if None in self.scale.values:
                self._multiply({None: factor})
            self.scale.requested.num_active = result.num_active

    def unscale(self, result: SyncResult, inverse: Tensor | None = None) -> Tensor:
        """Returns whether a gradient is inf or NaN: float32 0 or 1."""
        if result.arguments[0] != 1.0:
            factors = dict.fromkeys(self.scale.values, self._factor(result, inverse))
            narrow = any(bucket.buffer.flat.dtype is torch.float16 for bucket in self.buckets)
            if self.grads.sharded or narrow:
                self.scale.multiply_each(factors)
            else:
                self._multiply_in_grads(factors)
        _, finite = norm_of([(limbs, None) for limbs, _ in self.rows(2.0, Asked(self.buckets))], 2.0)
        self.scale.skip_unless(finite)
        return (1.0 - finite).float()

    def limit(self, result: SyncResult) -> None:
        self.scale.requested.limit = result.arguments[0]
        self.own.limit(result.arguments[0])
        self.scale.mark()

    # ---- inside

    @property
    def norm_dtype(self) -> torch.dtype:
        double = any(bucket.buffer.flat.dtype is torch.float64 for bucket in self.buckets)
        return torch.float64 if double else torch.float32

    def _multiply(self, factors: dict[Divisor, Tensor]) -> None:
        if self.grads.sharded:
            self.scale.multiply_each(factors)
        else:
            self._multiply_in_grads(factors)

    def _multiply_in_grads(self, factors: dict[Divisor, Tensor]) -> None:
        self.row_grads.multiply(factors)
        self.scale.multiply_in_grads(factors)

    def _receive_asked(self, result: SyncResult, asked: Asked | None, is_some: bool) -> Asked:
        if not is_some:
            return Asked(self.buckets)
        said = self.grads.ranks.all_gather_text("" if asked is None else " ".join(map(str, asked.numbers)))
        return find_by_number(self.buckets, map(int, said[result.speaker].split()))


def _watch(to_calls: weakref.ref[GradCalls]) -> None:
    """Has the next backward call before_backward(). Placeholders call this, which may outlive all of it."""

    def call() -> None:
        if (calls := to_calls()) is not None:
            calls.before_backward()

    if (calls := to_calls()) is not None:
        calls.grads.manager.backward.set_before_next(call)
