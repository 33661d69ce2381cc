"""The part of an optimizer that is about the mean gradient: its weight, scale, norm and limit, and who takes part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zerox._C import Meeting, Outcome
from zerox.flow.asked import asked_for
from zerox.flow.grad_calls import GradCalls
from zerox.flow.grads import Grads
from zerox.flow.join import ACTIVE, Join, Joinable, take_options
from zerox.memory.bucket import Bucket
from zerox.memory.row_table import RowTable
from zerox.ranks.calls import named
from zerox.ranks.teams import Teams

ASK_NOTHING = (Meeting.FOLLOW, Meeting.SYNCHRONIZE, Meeting.MEAN_OVER, Meeting.SKIP_STEP)  # of the mean


class MeanGradient(Joinable):
    """Between the last backward of a step and step()."""

    _buckets: list[Bucket]
    _grads: Grads
    _calls: GradCalls

    def _settle(self, meeting: Meeting, arguments: Sequence[float] = (), refusal: str = "") -> Outcome:
        raise NotImplementedError

    def _updating(self) -> AbstractContextManager[None]:
        """Around the part of step() in which ranks meet and update."""
        raise NotImplementedError

    def _update_all(self, capturing: bool) -> None:
        """What is left of step() once ranks have met."""
        raise NotImplementedError

    def _end_step(self) -> None:
        raise NotImplementedError

    def _check_join(self) -> None:
        """Raises for an option that does not go with join()."""
        raise NotImplementedError

    def _divisor_of(self, group: Mapping[str, Any]) -> float | None:
        raise NotImplementedError

    @property
    def _tables(self) -> Sequence[RowTable]:
        """Parameters whose gradients are rows."""
        return self._calls.row_grads.tables

    @property
    def _own(self) -> Mapping[int, Tensor]:
        """Parameters that are this rank's own."""
        return self._calls.own.params

    @property
    def _ranks_have_own(self) -> bool:
        return self._calls.own.are_some

    @property
    def _teams(self) -> Teams:
        """Who has which parameters."""
        return self._grads.teams

    @property
    def _is_first_of_model(self) -> bool:
        """Whether this rank is the first along all axes that DTensors lie on."""
        return self._grads.model.is_first

    @property
    def _has_step_options(self) -> bool:
        """Whether the step() under way was given options for a class of torch's kind."""
        return False

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
        asked = asked_for(self._buckets, parameters, self._own)
        arguments = self._calls.clip_arguments(max_norm, norm_type, error_if_nonfinite, asked)
        outcome = self._settle(Meeting.CLIP, arguments, self._calls.refusal("clip_grad_norm_()"))
        return self._calls.clip(outcome, asked)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Has the next step() cut each element of the mean gradient to ``[-clip_value, clip_value]``. Collective.

        It comes last: after every scale and norm of this step, on which it does not show. Raises ValueError for a
        negative number, RuntimeError with ``capturable=True``.
        """
        limit = float(clip_value)
        if not limit >= 0.0:
            raise ValueError(f"clip_value must not be negative, got {clip_value}")
        if self._calls.scale.keeps_place:
            raise RuntimeError("clip_grad_value_() does not go with capturable=True: clip by the norm")
        self._calls.limit(self._settle(Meeting.CLIP_VALUE, [limit], self._calls.refusal("clip_grad_value_()")))

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
        refusal = self._calls.refusal("mean_over()")
        if isinstance(count, Tensor):
            if count.numel() != 1:
                refusal = refusal or f"mean_over() takes one number, got a tensor of shape {tuple(count.shape)}"
            if count.device.type == "cpu" and count.numel() == 1:
                count = float(count)
        if not isinstance(count, Tensor) and not 0 <= count < math.inf:
            refusal = refusal or f"mean_over() was given the count {count}"
        outcome = self._settle(Meeting.MEAN_OVER, refusal=refusal)
        self._calls.mean_over(outcome, count)

    @named("scale_grads_()", per_batch=True)
    @torch.no_grad()
    def scale_grads_(self, factor: float | Tensor) -> None:
        """Multiplies the mean gradient by a number or a tensor of one element. Collective: every rank passes the same.

        In stage 1 ``p.grad`` is scaled at once, else it happens in step(), and norms see it. Ranks compare numbers and
        tensors of the host: RuntimeError on all if they differ. A tensor on an accelerator is taken as it is.
        """
        number, tensor = _as_argument(factor)
        outcome = self._settle(Meeting.SCALE_GRADS, [number], self._calls.refusal("scale_grads_()"))
        self._calls.multiply(outcome, tensor)

    @named("GradScaler.unscale_()", per_batch=True)
    @torch.no_grad()
    def unscale_grads_(self, inverse_scale: Tensor | None) -> Tensor:
        """What :class:`zerox.GradScaler` needs: multiplies gradients by ``inverse_scale`` (None: 1).

        If one is inf or NaN on any rank, the next step() changes nothing. Returns whether so: float32 0 or 1, a scalar
        on the parameters' device. In stage 1 ``p.grad`` is unscaled at once, unless a parameter is float16, whose
        gradients would underflow. Collective.
        """
        number, tensor = _as_argument(1.0 if inverse_scale is None else inverse_scale)
        outcome = self._settle(Meeting.UNSCALE, [number], self._calls.refusal("GradScaler.unscale_()"))
        return self._calls.unscale(outcome, tensor)

    def skip_step(self) -> None:
        """What :class:`zerox.GradScaler` calls instead of step(): forgets what clip and unscale left for it.

        Gradients stay, as after a step(). Collective inside join(), since ranks may follow.
        """
        if self._joining:
            self._settle(Meeting.SKIP_STEP)
            self._end_notice()
        self._calls.skip()

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
        self._check_join()
        return Join([self], divide)

    # ---- for ranks that follow: see zerox/flow/join.py

    def _set_joining(self, divide: str | None) -> None:
        self._joining = divide
        # Where gradients are whole, p.grad is so for whoever reads it before step(). Not with divisors of the user's,
        # which another number of active ranks does not touch.
        has_divisor = any(each is not None for each in self._calls.scale.of_groups)
        self._by_active = divide == ACTIVE and not self._grads.sharded and not has_divisor
        self._grads.manager.settlement.set_following(by_backward=False, by_active=self._by_active)

    def _follow(self) -> Meeting:
        self._calls.own.rests = True
        try:
            return self._followed()
        finally:
            self._calls.own.rests = False

    def _followed(self) -> Meeting:
        with torch.no_grad(), self._updating():
            outcome = self._settle(Meeting.FOLLOW)
            if outcome.meeting == Meeting.STEP:
                self._check_options(outcome, follows=True)
                self._update_all(capturing=False)
        if outcome.meeting == Meeting.STEP:
            self._end_step()
        else:
            with torch.no_grad():
                self._take_part(outcome)
        return outcome.meeting

    def _check_options(self, outcome: Outcome, follows: bool) -> None:
        """Of param groups, inside join(). Collective if ranks' differ."""
        if outcome.followed and outcome.arguments[0]:
            raise RuntimeError(
                "zerox: a rank that has run out of batches inside join() can't follow step() with options of its own"
            )
        if not outcome.has_same_options:
            take_options(self, outcome, follows)
        if [self._divisor_of(group) for group in self.param_groups] != self._calls.scale.of_groups:
            raise RuntimeError(
                "the gradient_divisor of a param group was changed, and gradients are divided while backward runs: "
                "build another optimizer, or call scale_grads_()"
            )
        self._calls.scale.check()

    def _divide_by_active(self, outcome: Outcome) -> None:
        """Means over all ranks that were not called for otherwise."""
        if self._by_active:
            if outcome.meeting not in (Meeting.FOLLOW, Meeting.SKIP_STEP):
                self._calls.scale.requested.num_active = outcome.num_active  # for mean_over()
        elif self._joining == ACTIVE and (outcome.operators or outcome.meeting not in ASK_NOTHING):
            self._calls.divide_by_active(outcome)

    def _take_part(self, outcome: Outcome) -> None:
        """In a call of the others, other than step()."""
        parts: dict[Meeting, Callable[[Outcome], object]] = {
            Meeting.CLIP: self._calls.clip,
            Meeting.CLIP_TOGETHER: self._calls.clip_together,
            Meeting.CLIP_VALUE: self._calls.limit,
            Meeting.MEAN_OVER: self._calls.mean_over,
            Meeting.SCALE_GRADS: self._calls.multiply,
            Meeting.UNSCALE: self._calls.unscale,
            Meeting.SKIP_STEP: self._calls.skip,
            Meeting.GRAD_NORM: self._calls.answers.take_part,
        }
        if outcome.meeting in parts:  # else there is nothing to do but to meet
            parts[outcome.meeting](outcome)


def _as_argument(factor: float | Tensor) -> tuple[float, Tensor | None]:
    """The number that ranks compare, and a tensor whose value the host does not know, beside NaN for the number."""
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            raise ValueError(f"a factor of the gradients is one number, got a tensor of shape {tuple(factor.shape)}")
        if factor.device.type != "cpu":
            return math.nan, factor.detach().reshape(())
    return float(factor), None
