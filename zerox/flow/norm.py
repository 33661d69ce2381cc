"""The norm of the whole gradient from all ranks' shards, and the scale that clips it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zerox import ops
from zerox._C import Combine
from zerox.flow.grads import Grads


def shard_words(shard: Tensor, segments: Tensor, p: float) -> Tensor:
    """The exact sum (int64 ``[EXACT_WORDS]``) of one shard's norm."""
    words = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=shard.device)
    ops.norm_(words, shard, segments, p)
    return words


def words_of(grads: Grads, p: float) -> Iterator[Tensor]:
    """The sum of each part of this rank's shards; sums that the reduction left are taken as they are."""
    for index in range(grads.manager.num_buckets):
        words = grads.words(index) if p == 2.0 else None
        if words is not None:
            yield words
            continue
        for part in grads.parts(index):
            yield shard_words(part.grad, part.segments, p)


def total_norm(grads: Grads, p: float) -> tuple[Tensor, Tensor]:
    """The norm over all shards of all ranks and whether every element is finite, as float64 scalars. Collective.

    The sums are exact, so neither bucket sizes nor the number of ranks show in the result.
    """
    total = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=grads.ranks.device)
    for each in words_of(grads, p):
        total = torch.maximum(total, each) if math.isinf(p) else total + each
    grads.all_reduce(total, Combine.MAX if math.isinf(p) else Combine.SUM)
    value = ops.norm_value(total, p)
    return value[0], value[1]


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))`` in the norm's dtype, as torch.nn.utils.clip_grads_with_norm_ computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def check_finite(total: Tensor, finite: Tensor, p: float) -> None:
    """RuntimeError, as torch.nn.utils.clip_grad_norm_, if the norm or the gradients (``finite``) are not finite."""
    if not (bool(finite) and bool(total.isfinite())):
        raise RuntimeError(
            f"The total norm of order {p} for gradients is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
