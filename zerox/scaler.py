"""Loss scaling for 16-bit gradients that are spread over ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zerox import _torch
from zerox.engine import Engine


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that knows :class:`zerox.FusedShardedAdam`, in every stage; for others it is torch's.

    Takes torch's arguments. An inf or NaN in any rank's gradients skips the step on all of them, leaves state and step
    counts as they were, and backs the scale off. As in torch, ``step(optimizer)`` waits for the device to find this
    out, and then does not call ``optimizer.step()``: step hooks, schedulers and Accelerate see the skip. ``unscale_``
    and ``step(optimizer)`` are collective. After ``unscale_``, ``optimizer.clip_grad_norm_`` sees unscaled gradients,
    and in stage 1 so does everything that reads ``p.grad``, unless a parameter is float16: float16 gradients would
    underflow, so gradients stay scaled in ``p.grad`` and step() unscales them in float32.
    """

    @functools.wraps(torch.amp.GradScaler.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _torch.check_scaler()
        super().__init__(*args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, Engine):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = optimizer.unscale_grads_(inv_scale)
        return {found.device: found}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if not isinstance(optimizer, Engine):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        found = optimizer_state["found_inf_per_device"].values()
        # The same on all ranks, since unscale_grads_() asked all. While a CUDA graph is captured the host can't ask,
        # and step() itself then changes nothing.
        if not any(_is_capturing(each) for each in found) and any(each.item() for each in found):
            optimizer.skip_step()
            return None
        return optimizer.step(*args, **kwargs)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
