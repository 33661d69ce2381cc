"""The momentum of one parameter, in whatever form it is stored."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zerox import ops
from zerox.memory.forms import decode
from zerox.memory.stored import Stored


def average(stored: Stored, grad: Tensor, momentum: float, segments: Tensor | None, step: Tensor) -> Tensor:
    """``stored = momentum * stored + (1 - momentum) * grad``; returns the new one, before it was rounded to its form.

    ``grad``: ``[n]``, float32 or wider. ``segments``: where in its parameter it lies (ops.py), and ``step``: int64
    ``[1]``, the parameter's update's: these draw the random numbers by which bfloat16 is rounded. None: is_wide.
    """
    if segments is None:
        return stored.values.lerp_(grad, 1 - momentum)
    wide = decode(stored).to(stored.wide, copy=True).lerp_(grad, 1 - momentum)
    _store(stored, wide, segments, step)
    return wide


def _store(stored: Stored, wide: Tensor, segments: Tensor, step: Tensor) -> None:
    """Rounded as other states: SGD's kernel adds a gradient, which this is, to a momentum of zeros."""
    stored.zero_()
    shard = ops.Shard(
        param=torch.empty_like(wide),  # of no interest
        master=None,
        grad=wide,
        state=[stored.values],
        scales=[] if stored.scales is None else [stored.scales],
        segments=segments,
        present=torch.ones(1, dtype=torch.uint8, device=wide.device),
        steps=step.clone(),  # which the kernel counts
    )
    ops.update_("sgd", [shard], _options(wide.device))


@functools.cache
def _options(device: torch.device) -> Tensor:
    """A row of SGD's: lr, momentum, dampening, weight_decay, nesterov, maximize."""
    return torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64, device=device)
