"""Between the gradients and the next step(): one factor for all of them, and whether to step at all."""

from __future__ import annotations

import torch
from torch import Tensor

from zerox import _C as C


class GradScale:
    """Scalars on ``device`` that clip_grad_norm_() and GradScaler leave for the next step().

    ``value`` (float64) multiplies all gradients; ``finite`` (uint8) is 0 if the step must change nothing. None stands
    for 1, but not with ``keeps_place``: then each stays at one address, for CUDA graphs.
    """

    def __init__(self, manager: C.BucketManager, device: torch.device, keeps_place: bool) -> None:
        self.manager = manager
        self.keeps_place = keeps_place
        self.value = torch.ones((), dtype=torch.float64, device=device) if keeps_place else None
        self.finite = torch.ones((), dtype=torch.uint8, device=device) if keeps_place else None
        self.num_added: int | None = None  # the manager's, when a scalar was set; None: none was

    def multiply(self, coefficient: Tensor) -> None:
        if self.value is None:
            self.value = coefficient.double()
        elif self.keeps_place:
            self.value.mul_(coefficient)
        else:
            self.value = coefficient.double() * self.value
        self._mark()

    def skip_unless(self, finite: Tensor) -> None:
        """``finite``: 1 or 0, of any dtype."""
        if self.finite is not None:
            self.finite.mul_(finite.to(torch.uint8))
        else:
            self.finite = finite.to(torch.uint8)
        self._mark()

    def present(self, present: Tensor) -> Tensor:
        """The segments that take part in the step; the host need not know whether it is skipped."""
        return present if self.finite is None else present * self.finite

    def forget_if_discarded(self) -> None:
        """Resets if the scaled gradients are all gone (model.zero_grad()): others are not scaled."""
        if self.num_added is not None and not self.manager.settlement.holds_scaled:
            self.reset()

    def check(self) -> None:
        """RuntimeError if gradients were added to the scaled ones."""
        if self.num_added not in (None, self.manager.settlement.num_added):
            raise RuntimeError(
                "gradients were added between clip_grad_norm_() or GradScaler.unscale_() and step(): the scale of the "
                "first can't be told from that of the others any more. Call these after the last backward, or call "
                "zero_grad()"
            )

    def reset(self) -> None:
        if self.keeps_place:
            assert self.value is not None
            assert self.finite is not None
            self.value.fill_(1.0)
            self.finite.fill_(1)
        else:
            self.value = self.finite = None
        self.num_added = None

    def _mark(self) -> None:
        self.manager.grads.mark_scaled()
        self.num_added = self.manager.settlement.num_added
