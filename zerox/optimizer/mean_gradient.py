"""The part of an optimizer that is about the mean gradient: its weight, scale, norm and limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from zerox._C import SyncPoint
from zerox.grads.asked import find_asked
from zerox.optimizer.core import Core, Face
from zerox.ranks.calls import named


class MeanGradient:
    """Between the last backward of a step and step(). Each call is as the optimizer's own, and collective."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.calls = core.calls

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, raises: bool, parameters: Tensor | Iterable[Tensor] | None
    ) -> Tensor:
        """Collective."""
        asked = find_asked(self.core.buckets, parameters, self.calls.own.params)
        arguments = self.calls.clip_arguments(max_norm, norm_type, raises, asked)
        result = self.core.sync(SyncPoint.CLIP, arguments, self.calls.refusal("clip_grad_norm_()"))
        return self.calls.clip(result, asked)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Collective."""
        limit = float(clip_value)
        if not limit >= 0.0:
            raise ValueError(f"clip_value must not be negative, got {clip_value}")
        if self.calls.scale.keeps_place:
            raise RuntimeError("clip_grad_value_() does not go with capturable=True: clip by the norm")
        self.calls.limit(self.core.sync(SyncPoint.CLIP_VALUE, [limit], self.calls.refusal("clip_grad_value_()")))

    def mean_over(self, count: float | Tensor) -> None:
        """Collective."""
        refusal = self.calls.refusal("mean_over()")
        if isinstance(count, Tensor):
            if count.numel() != 1:
                refusal = refusal or f"mean_over() takes one number, got a tensor of shape {tuple(count.shape)}"
            if count.device.type == "cpu" and count.numel() == 1:
                count = float(count)
        if not isinstance(count, Tensor) and not 0 <= count < math.inf:
            refusal = refusal or f"mean_over() was given the count {count}"
        result = self.core.sync(SyncPoint.MEAN_OVER, refusal=refusal)
        self.calls.mean_over(result, count)

    def scale_grads_(self, factor: float | Tensor) -> None:
        """Collective."""
        number, tensor = _as_argument(factor)
        result = self.core.sync(SyncPoint.SCALE_GRADS, [number], self.calls.refusal("scale_grads_()"))
        self.calls.multiply(result, tensor)

    def unscale_grads_(self, inverse_scale: Tensor | None) -> Tensor:
        """Collective."""
        number, tensor = _as_argument(1.0 if inverse_scale is None else inverse_scale)
        result = self.core.sync(SyncPoint.UNSCALE, [number], self.calls.refusal("GradScaler.unscale_()"))
        return self.calls.unscale(result, tensor)

    def skip_step(self) -> None:
        """Collective."""
        if self.core.joining.divide is not None:
            self.core.sync(SyncPoint.SKIP_STEP)
            self.core.joining.is_notified = False
        self.calls.skip()


class MeanGradientFace(Face):
    _mean: MeanGradient

    @named("clip_grad_norm_()", per_batch=True)
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Returns the norm of the whole mean gradient, and has the next step() scale it to ``max_norm`` at most.

        ``parameters``: the norm of these only, and the scale for these only. The norm is a scalar tensor, float64 if a
        parameter is, else float32; ``norm_type`` is any positive number or ``inf``. Collective: every rank passes the
        same. Raises RuntimeError for a norm that is not finite if asked to; ValueError for another ``norm_type``, or a
        tensor that this optimizer does not train. Call it after the last backward of a step: if more gradients follow,
        step() raises RuntimeError.
        """
        return self._mean.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, parameters)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Has the next step() cut each element of the mean gradient to ``[-clip_value, clip_value]``. Collective.

        It comes last: after every scale and norm of this step, on which it does not show. Raises ValueError for a
        negative number, RuntimeError with ``capturable=True``.
        """
        self._mean.clip_grad_value_(clip_value)

    @named("mean_over()", per_batch=True)
    @torch.no_grad()
    def mean_over(self, count: float | Tensor) -> None:
        """Makes the gradient of summed losses the mean over all that was counted, such as tokens.

        ``count``: of this rank, over all its micro-batches of this step: a number or a tensor of one element, on the
        host or on the parameters' device (which the host then does not wait for). The sum of all ranks' losses is
        divided by the sum of their counts, and by no ``gradient_divisor``. If nothing was counted anywhere, the
        gradient is 0. In stage 1 ``p.grad`` is scaled at once, else it happens in step().

        Collective, once a step, after the last backward and before ``clip_grad_norm_()``. Raises RuntimeError on all
        ranks for a second call, one after a clip, one on some ranks only, or a count that is negative or not finite.
        """
        self._mean.mean_over(count)

    @named("scale_grads_()", per_batch=True)
    @torch.no_grad()
    def scale_grads_(self, factor: float | Tensor) -> None:
        """Multiplies the mean gradient by a number or a tensor of one element. Collective: every rank passes the same.

        In stage 1 ``p.grad`` is scaled at once, else it happens in step(), and norms see it. Ranks compare numbers and
        tensors of the host: RuntimeError on all if they differ. A tensor on an accelerator is taken as it is.
        """
        self._mean.scale_grads_(factor)

    @named("GradScaler.unscale_()", per_batch=True)
    @torch.no_grad()
    def unscale_grads_(self, inverse_scale: Tensor | None) -> Tensor:
        """What :class:`zerox.GradScaler` needs: multiplies gradients by ``inverse_scale`` (None: 1).

        If one is inf or NaN on any rank, the next step() changes nothing. Returns whether so: float32 0 or 1, a scalar
        on the parameters' device. In stage 1 ``p.grad`` is unscaled at once, unless a parameter is float16, whose
        gradients would underflow. Collective.
        """
        return self._mean.unscale_grads_(inverse_scale)

    def skip_step(self) -> None:
        """What :class:`zerox.GradScaler` calls instead of step(): forgets what clip and unscale left for it.

        Gradients stay, as after a step(). Collective inside join(), since ranks may follow.
        """
        self._mean.skip_step()


def _as_argument(factor: float | Tensor) -> tuple[float, Tensor | None]:
    """The number that ranks compare, and a tensor whose value the host does not know, beside NaN for the number."""
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            raise ValueError(f"a factor of the gradients is one number, got a tensor of shape {tuple(factor.shape)}")
        if factor.device.type != "cpu":
            return math.nan, factor.detach().reshape(())
    return float(factor), None
