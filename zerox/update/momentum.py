"""The momentum of parameters, in whatever form it is stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerox import _torch, ops
from zerox.memory.forms import decode
from zerox.memory.stored import Stored


class Momentum(NamedTuple):
    """``segments``: where in its parameter it lies (ops.py), and ``step``: int64 ``[1]``, the parameter's update's:
    these draw the random numbers by which bfloat16 is rounded. None: is_wide."""

    stored: Stored
    segments: Tensor | None
    step: Tensor


def average(momenta: Sequence[Momentum], grads: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """``stored = momentum * stored + (1 - momentum) * grad``; returns the new ones, before they were rounded to their
    form, which all have in common.

    ``grads``: ``[n]``, float32 or wider.
    """
    if momenta[0].stored.is_wide:
        wide = [each.stored.values for each in momenta]
        _torch.for_each("lerp_", wide, grads, 1 - momentum)
        return wide
    wide = [decode(each.stored).to(each.stored.wide, copy=True) for each in momenta]
    _torch.for_each("lerp_", wide, grads, 1 - momentum)
    _store(momenta, wide)
    return wide


def _store(momenta: Sequence[Momentum], wide: Sequence[Tensor]) -> None:
    """Rounded as other states: SGD's kernel adds a gradient, which this is, to a momentum of zeros."""
    shards = []
    for (stored, segments, step), values in zip(momenta, wide, strict=True):
        assert segments is not None
        stored.zero_()
        shards.append(
            ops.Shard(
                param=torch.empty_like(values),  # of no interest
                master=None,
                grad=values,
                state=[stored.values],
                scales=[] if stored.scales is None else [stored.scales],
                segments=segments,
                present=_present(values.device),
                steps=step.clone(),  # which the kernel counts
            )
        )
    ops.update_("sgd", shards, _options(wide[0].device))


@functools.cache
def _present(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.uint8, device=device)


@functools.cache
def _options(device: torch.device) -> Tensor:
    """A row of SGD's: lr, momentum, dampening, weight_decay, nesterov, maximize."""
    return torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64, device=device)
