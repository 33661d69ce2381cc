"""One parameter's whole mean gradient on every rank, and back: between the last backward of a step and step()."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zerox._C import SyncPoint
from zerox.memory.bucket import GradPart, refuse_dtensors
from zerox.memory.forms import same_values
from zerox.memory.one_param import OneParam, agree_on_param, agree_on_table, one_param
from zerox.optimizer.core import Core, Face
from zerox.ranks.calls import named, warn_caller
from zerox.ranks.dtensors import whole_of


class OneGradient:
    """Each call is as the optimizer's own, and collective. What it sends is of that parameter alone."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def full_grad(self, p: Tensor) -> Tensor | None:
        """Collective."""
        self.core.sync(SyncPoint.FULL_GRAD)
        if (table := agree_on_table(self.core.tables, self.core.grads.subgroups, p, "full_grad()")) is not None:
            return self.core.calls.row_grads.full_grad(table, self.core.calls.scale)
        one = agree_on_param(self.core.buckets, self.core.grads.subgroups, self.core.calls.own.params, p, "full_grad()")
        found = self._full_grad(one)
        return None if found is None else whole_of(one.member.param, found)

    def set_full_grad_(self, p: Tensor, value: Tensor) -> None:
        """Collective."""
        call = "set_full_grad_()"
        refuse_dtensors((member for bucket in self.core.buckets for member in bucket.members), call)
        self.core.sync(SyncPoint.FULL_GRAD)
        ranks = self.core.grads.ranks
        with ranks.refusals_told():
            one = one_param(self.core.buckets, self.core.grads.subgroups, self.core.calls.own.params, p, call)
            given = one.take_value("the gradient", value)
        one.agree(call, {"values": given})
        if refusal := self.core.calls.refusal(call):
            raise RuntimeError(refusal)
        now = self._full_grad(one)
        if now is None:
            raise RuntimeError(
                f"{call}: no rank has a gradient of parameter {one.member.quoted}; call it after a backward that "
                "reaches the parameter"
            )
        self._put_gradient(one, given, same_values(now, given))
        self.core.calls.answers.forget()

    # ---- inside

    def _full_grad(self, one: OneParam) -> Tensor | None:
        """Of a DTensor what its local tensor has. Collective, once everything has been reduced."""
        parts = list(self._own_grad(one))  # first: whole gradients are looked at here
        row = one.own_row
        present = self.core.grads.present(one.index)
        flag = present.new_zeros(1) if row is None else present[row : row + 1]
        if not int(one.from_owner(flag, "whether there is a gradient")):
            return None
        own = None if row is None else self._as_step_sees(one, parts[0].grad).to(one.wide)
        return one.all_gather(own, one.wide, "the gradient")

    def _own_grad(self, one: OneParam) -> Iterator[GradPart]:
        """This rank's elements of the mean as they lie, or as a packed copy in stage 1; nothing if there are none."""
        row, elements = one.own_row, one.own_elements
        for part in self.core.grads.parts(one.index):
            if row is not None and part.first_row <= row < part.first_row + part.segments.shape[0]:
                grad = part.grad[elements.start - part.start : elements.stop - part.start]
                yield GradPart(grad, elements.start, row, part.segments[row - part.first_row :][:1])

    def _as_step_sees(self, one: OneParam, grad: Tensor) -> Tensor:
        """Elements of a gradient with what calls after backward left for step(), in the dtype of its arithmetic."""
        scale = self.core.calls.scale
        grad = scale.clamp(grad, one.index)
        left = scale.remaining_factor(one.index)
        in_own_dtype = one.bucket.rule.on_host and one.bucket.master is None  # a class of torch's kind without masters
        grad = grad.to(one.bucket.buffer.flat.dtype if in_own_dtype else one.wide)
        return grad if left is None else grad * left

    def _put_gradient(self, one: OneParam, given: Tensor, unchanged: Tensor) -> None:
        """``unchanged``: elements that are as given already. They stay: a product is not divided without a rounding."""
        unscaled = self._unscale(one, given)
        wire = self.core.grads.wire_dtype(one.bucket)
        lands = unscaled.to(wire)
        if bool((given.isfinite() & ~lands.isfinite()).any()):
            raise ValueError(
                f"set_full_grad_(): values for parameter {one.member.quoted} are too large for gradients in {wire}"
            )
        seen = self._as_step_sees(one, lands)
        narrow = min(wire, seen.dtype, key=lambda dtype: dtype.itemsize)
        # A scale may cost float32's last place, which is documented, and no reason to warn.
        if narrow.itemsize < given.itemsize and not bool((unchanged | same_values(given, seen)).all()):
            warn_caller(
                f"zerox: set_full_grad_() rounded parameter {one.member.quoted}: its gradients are in {narrow}",
            )
        if not self.core.grads.sharded:
            # Past its version: it stays the mean of all ranks, which is not sent again.
            assert one.member.param.grad is not None
            whole = one.member.param.grad.data
            whole.copy_(torch.where(unchanged, whole, unscaled.to(whole.dtype)) if unscaled is not given else given)
        if self.core.grads.sharded or torch.promote_types(wire, one.bucket.grad_dtype) != one.bucket.grad_dtype:
            own_unchanged, own = one.own_part(unchanged), one.own_part(lands)
            for part in self._own_grad(one):
                part.grad.copy_(torch.where(own_unchanged, part.grad, own))
        self.core.grads.forget_limbs(one.index)

    def _unscale(self, one: OneParam, given: Tensor) -> Tensor:
        """What step() multiplies to get the ``given`` values."""
        left = self.core.calls.scale.remaining_factor(one.index)
        if left is None:
            return given
        factor = left.to(one.wide)
        if float(factor) == 0.0 or not bool(factor.isfinite()):
            raise RuntimeError(
                f"set_full_grad_(): step() will multiply the gradients by {float(factor)}, whatever they are: set them "
                "before clip_grad_norm_(), mean_over() or scale_grads_()"
            )
        return given.double() / factor.double()


class OneGradientFace(Face):
    _one_gradient: OneGradient

    @named("full_grad()")
    @torch.no_grad()
    def full_grad(self, p: Tensor) -> Tensor | None:
        """The whole mean gradient of one parameter, on every rank, as step() will use it; None if no rank has one.

        So it is after ``mean_over()``, ``scale_grads_()``, a scaler's ``unscale_()``, ``clip_grad_norm_()`` and
        ``clip_grad_value_()``, also where step() is what applies them. A new tensor in the parameter's shape and order
        in memory, float32 (float64 for float64 parameters), on its device. Collective: all ranks ask for the same
        parameter. Raises ValueError on all ranks if they don't, or for a tensor that this optimizer does not train: a
        frozen parameter is none.
        """
        return self._one_gradient.full_grad(p)

    @named("set_full_grad_()")
    @torch.no_grad()
    def set_full_grad_(self, p: Tensor, value: Tensor) -> None:
        """Makes ``value`` the gradient of one parameter that step() will use, and that norms see from now on.

        It is in the scale of :meth:`full_grad`; what that returned changes nothing when it is set again. Each rank
        keeps its part, in the dtype in which gradients were reduced, with a warning if that holds less; in stage 1
        ``p.grad`` has it on all ranks. If step() multiplies gradients (after a clip, or in stages 2 and 3 a scale), the
        product is ``value`` to within one unit in the last place: set it before these for every bit.

        Collective: all ranks pass the same parameter and equal values. Raises ValueError on all ranks as
        :meth:`full_grad`, and for other values; RuntimeError on all ranks if none has a gradient of it, after
        ``clip_grad_value_()``, and if gradients are multiplied by 0 or by what is not finite.
        """
        self._one_gradient.set_full_grad_(p, value)
