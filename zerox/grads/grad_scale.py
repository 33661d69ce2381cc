"""Between the gradients and the next step(): what all of them are multiplied by, and whether to step at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerox import _C as C

Divisor = float | None  # a group's gradient_divisor; None: the number of ranks


@dataclass(frozen=True, eq=False)
class Norm:
    """A 2-norm of the whole gradient, and the manager's ``num_added`` when it was taken."""

    value: Tensor
    num_added: int


@dataclass
class Requested:
    """What was asked of this step's gradients so far. It is the same on all ranks."""

    mean_over: bool = False
    clip: str = ""  # the call
    limit: float | None = None  # clip_grad_value_()'s
    num_active: int | None = None  # ranks by whose number means were divided again: see Engine.join()
    norm: Norm | None = None  # the last one over all elements
    by_operators: bool = False  # p.grad.mul_() and its like left a factor


@dataclass(frozen=True, eq=False)
class Applied:
    """What calls had the last step() multiply by, for the gradients that are still there."""

    values: dict[Divisor, Tensor | None]
    num_added: int


class GradScale:
    """Scalars on ``device`` that calls after backward leave for the next step().

    ``values`` (float64) multiply the gradients of buckets, by their divisors; ``finite`` (uint8) is 0 if the step must
    change nothing. None stands for 1, but not with ``keeps_place``: then each stays at one address, for CUDA graphs.
    """

    def __init__(self, manager: C.BucketManager, device: torch.device, keeps_place: bool) -> None:
        self.manager = manager
        self.device = device
        self.keeps_place = keeps_place
        self.of_groups: list[Divisor] = []
        self.divisors: list[Divisor] = []  # of each bucket
        self.values: dict[Divisor, Tensor | None] = {}
        self.finite = torch.ones((), dtype=torch.uint8, device=device) if keeps_place else None
        self.num_added: int | None = None  # the manager's, when a scalar was set; None: none was
        self.rows_reduced = False  # whether tables have gradients: zerox/rows/rows.py
        self.holds_rows = False  # and had some when a scalar was set
        self.requested = Requested()
        self.applied: Applied | None = None

    def add_bucket(self, divisor: Divisor) -> None:
        self.divisors.append(divisor)
        self.know(divisor)

    def know(self, divisor: Divisor) -> None:
        """Gradients may have this divisor."""
        if divisor not in self.values:
            place = torch.ones((), dtype=torch.float64, device=self.device) if self.keeps_place else None
            self.values[divisor] = place

    def of(self, bucket: int) -> Tensor | None:
        return self.values[self.divisors[bucket]]

    def multiply(self, coefficient: Tensor) -> None:
        self.multiply_each(dict.fromkeys(self.values, coefficient))

    def multiply_each(self, coefficients: Mapping[Divisor, Tensor]) -> None:
        """By divisor."""
        for divisor, coefficient in coefficients.items():
            value = self.values[divisor]
            if value is None:
                self.values[divisor] = coefficient.double()
            elif self.keeps_place:
                value.mul_(coefficient)
            else:
                self.values[divisor] = coefficient.double() * value
        self.mark()

    def leave_factor(self, factor: Tensor) -> None:
        """For all, by operators on p.grad: unlike after multiply(), more gradients may be added (ShardWriter.fold)."""
        for divisor, value in self.values.items():
            self.values[divisor] = factor if value is None else factor * value
        self.manager.grads.mark_scaled()
        self.requested.by_operators = True

    def multiply_in_grads(self, coefficients: Mapping[Divisor, Tensor]) -> None:
        """Where ``p.grad`` is the whole mean: at once."""
        for bucket, divisor in enumerate(self.divisors):
            if divisor in coefficients:
                self.manager.grads.scale(bucket, coefficients[divisor], None)
        self.mark()

    def skip_unless(self, finite: Tensor) -> None:
        """``finite``: 1 or 0, of any dtype."""
        if self.finite is not None:
            self.finite.mul_(finite.to(torch.uint8))
        else:
            self.finite = finite.to(torch.uint8)
        self.mark()

    def present(self, present: Tensor) -> Tensor:
        """The segments that take part in the step; the host need not know whether it is skipped."""
        return present if self.finite is None else present * self.finite

    def clamp(self, grad: Tensor, bucket: int) -> Tensor:
        """After clip_grad_value_(): a scaled copy, in float32 or wider, with no element above the limit."""
        if self.requested.limit is None:
            return grad
        wide = grad if grad.dtype is torch.float64 else grad.float()
        value = self.of(bucket)
        scaled = wide if value is None else wide * value
        return scaled.clamp(-self.requested.limit, self.requested.limit)

    def remaining_factor(self, bucket: int) -> Tensor | None:
        """What clamp() has not multiplied by yet."""
        return self.of(bucket) if self.requested.limit is None else None

    def forget_if_discarded(self) -> None:
        """Resets if the scaled gradients are all gone (model.zero_grad()): others are not scaled."""
        is_set = self.num_added is not None or self.requested.by_operators
        if is_set and not (self.manager.synchronizer.holds_scaled or self.holds_rows):
            self.reset()

    def check(self) -> None:
        """RuntimeError if gradients were added to the scaled ones."""
        if self.num_added not in (None, self.manager.synchronizer.num_added):
            self.refuse_added()

    def note_rows(self, were_added: bool, hold: bool) -> None:
        """Rows of tables have changed. ``were_added``: to those that were there. ``hold``: there are some now.

        RuntimeError on all ranks, who say the same, if the scale was computed for other gradients than there are.
        """
        if self.num_added is not None and (were_added or self.manager.synchronizer.holds_scaled):
            self.refuse_added()
        if self.num_added is not None:
            self.reset()
        self.rows_reduced = hold

    @staticmethod
    def refuse_added() -> None:
        raise RuntimeError(
            "gradients were added between clip_grad_norm_(), mean_over() or GradScaler.unscale_() and step(): the "
            "scale of the first can't be told from that of the others any more. Call these after the last backward, "
            "or call zero_grad()"
        )

    def reset(self) -> None:
        if self.keeps_place:
            assert self.finite is not None
            self.finite.fill_(1)
        else:
            self.finite = None
        for divisor, value in self.values.items():
            if self.keeps_place and value is not None:
                value.fill_(1.0)
            else:
                self.values[divisor] = None
        self.num_added, self.holds_rows = None, False
        self.requested = Requested()
        self.applied = None

    def end_step(self) -> None:
        """Gradients stay, with what was done to them through p.grad. What calls asked for was for one step."""
        values, by_operators = dict(self.values), self.requested.by_operators
        has_any = not self.keeps_place and any(value is not None for value in values.values())
        self.reset()
        if by_operators:
            self.values, self.requested.by_operators = values, True
        elif has_any:
            self.applied = Applied(values, self.manager.synchronizer.num_added)

    def factors(self, sizes: Sequence[int]) -> Tensor | None:
        """By what each gradient is, or was, multiplied: a scalar, or one for each; None: 1. ``sizes``: buckets'."""
        values: Mapping[Divisor, Tensor | None] = self.values
        if self.applied is not None and self.applied.num_added == self.manager.synchronizer.num_added:
            values = self.applied.values if all(value is None for value in values.values()) else values
        found = {divisor: values[divisor] for divisor in self.divisors}
        if len(found) == 1 or not any(value is not None for value in found.values()):
            return next(iter(found.values()), None)
        one = torch.ones((), dtype=torch.float64, device=self.device)
        known = {divisor: one if value is None else value for divisor, value in found.items()}
        return torch.cat([known[divisor].expand(size) for divisor, size in zip(self.divisors, sizes, strict=True)])

    def mark(self) -> None:
        """To be called when gradients were scaled: those that come later would not be."""
        self.manager.grads.mark_scaled()
        self.holds_rows = self.rows_reduced
        self.num_added = self.manager.synchronizer.num_added
