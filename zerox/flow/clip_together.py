"""One norm over the gradients of several optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerox._C import Meeting
from zerox.flow.asked import Asked
from zerox.flow.grad_calls import order_of
from zerox.flow.mean_gradient import MeanGradient
from zerox.flow.norm import check_finite, clip_coefficient, norm_of


@torch.no_grad()
def clip_grad_norm_(
    optimizers: MeanGradient | Iterable[MeanGradient],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: Any = None,
) -> Tensor:
    """One norm over the gradients of several optimizers, and one scale for all of them, as if they were one.

    As :meth:`zerox.FusedShardedAdam.clip_grad_norm_`, with the optimizers in the same order on all ranks. ``group``: a
    further process group, whose ranks hold other parts of the model, as those of tensor parallelism do: their norm is
    included. What several of them hold is counted several times. Axes on which parameters are DTensors, and those of
    ``norm_group``, are in the norm already: ValueError for such a group.
    """
    given = [optimizers] if isinstance(optimizers, MeanGradient) else list(optimizers)
    p = order_of(norm_type)
    if not given:
        raise ValueError("zerox.clip_grad_norm_() needs at least one optimizer")
    check_axes(given, group)
    rows: list[tuple[Tensor, Tensor | None]] = []
    outcomes = []
    for optimizer in given:
        calls = optimizer._calls
        refusal = calls.refusal("zerox.clip_grad_norm_()")
        outcomes.append(optimizer._settle(Meeting.CLIP_TOGETHER, [p, float(max_norm)], refusal))
        rows += calls.rows(p, Asked(optimizer._buckets))
    device = rows[0][0].device
    rows = [(words.to(device), None if factor is None else factor.to(device)) for words, factor in rows]
    if group is not None:
        rows = [(_over(group, words, p), factor) for words, factor in rows]
    norm, finite = norm_of(rows, p)
    double = any(optimizer._calls.norm_dtype is torch.float64 for optimizer in given)
    total = norm.to(torch.float64 if double else torch.float32)
    coefficient = clip_coefficient(total, float(max_norm))
    for optimizer in given:
        optimizer._calls.note_norm(total, p)
    if max_norm != math.inf:
        for optimizer, outcome in zip(given, outcomes, strict=True):
            optimizer._calls.clip_together(outcome, coefficient.to(optimizer._grads.ranks.device))
    if error_if_nonfinite:
        check_finite(total, finite, p)
    return total


def check_axes(optimizers: Sequence[MeanGradient], group: Any) -> None:
    """ValueError unless the norms of all are over the same model axes, and ``group`` is none of them."""
    first = optimizers[0]._grads.model
    for axis in first.axes if group is not None else ():
        if len(set(axis.ranks) & set(dist.get_process_group_ranks(group))) > 1:
            raise ValueError(
                f"zerox.clip_grad_norm_(): group= has ranks of the axis {axis}, which the optimizers' norms are over "
                "already: leave group out"
            )
    for index, optimizer in enumerate(optimizers):
        if (model := optimizer._grads.model).axes != first.axes:
            raise ValueError(
                f"zerox.clip_grad_norm_(): the norm of optimizer 0 is over {first}, that of optimizer {index} over "
                f"{model}: one of them would be counted too often. Give both parameters on the same axes, as param "
                "groups of one optimizer, or the missing axis as norm_group if its ranks have parameters of their own"
            )


def _over(group: Any, words: Tensor, p: float) -> Tensor:
    """Summed over the ranks of another group too."""
    dist.all_reduce(words, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
    return words
