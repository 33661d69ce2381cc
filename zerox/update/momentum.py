"""The momentum of one parameter, in whatever form it is stored."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zerox import ops
from zerox.memory.forms import convert_
from zerox.memory.stored import Stored
from zerox.plan.form import FLOAT32


def average(stored: Stored, grad: Tensor, momentum: float, number: int, step: Tensor) -> Tensor:
    """``stored = momentum * stored + (1 - momentum) * grad``; returns the new one, before it was rounded to its form.

    ``grad``: ``[n]``, float32 or wider. ``number``: of the parameter, and ``step``: int64 ``[1]``, its update's, from 1
    on: these draw the random numbers by which bfloat16 is rounded.
    """
    if stored.is_wide:
        return stored.values.lerp_(grad, 1 - momentum)
    if momentum == 0:
        convert_(stored, Stored(stored.spec, FLOAT32, grad))
        return grad
    # SGD's kernel computes this average, and a parameter of zeros with lr=-1 becomes it.
    found = torch.zeros_like(grad)
    segment = torch.tensor([[0, grad.numel(), 0, number, 0]], dtype=torch.int64, device=grad.device)
    shard = ops.Shard(
        param=found,
        master=None,
        grad=grad,
        state=[stored.values],
        scales=[] if stored.scales is None else [stored.scales],
        segments=segment,
        present=torch.ones(1, dtype=torch.uint8, device=grad.device),
        steps=step.clone(),  # which the kernel counts: the first step of SGD, another formula, is behind it
    )
    ops.update_("sgd", [shard], _options(momentum, grad.device))
    return found


@functools.cache
def _options(momentum: float, device: torch.device) -> Tensor:
    """A row of SGD's: lr, momentum, dampening, weight_decay, nesterov, maximize."""
    return torch.tensor([[-1.0, momentum, momentum, 0.0, 0.0, 0.0]], dtype=torch.float64, device=device)
