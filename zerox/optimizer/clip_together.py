"""One norm over the gradients of several optimizers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerox._C import SyncPoint
from zerox.grads.asked import Asked
from zerox.grads.norm import check_finite, clip_coefficient, norm_of, order_of
from zerox.optimizer.core import Core, Face
from zerox.params.compiled_regions import untraced
from zerox.ranks.calls import named, waiting
from zerox.ranks.process_group import ranks_of

CALL = "zerox.clip_grad_norm_()"
REFUSED = f"{CALL}: "
TOLD = f"can't go on: {REFUSED}"  # in what another rank's refusal raises here
GO_ON = "Call optimizer.zero_grad() on all ranks; state is as it was before"  # as csrc/grads/synchronizer.cpp says it
_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # whose ranks have once found nothing to refuse


@untraced
@named("zerox.clip_grad_norm_()", per_batch=True)
@torch.no_grad()
def clip_grad_norm_(
    optimizers: Face | Iterable[Face],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: Any = None,
) -> Tensor:
    """One norm over the gradients of several optimizers, and one scale for all of them, as if they were one.

    As :meth:`zerox.FusedShardedAdam.clip_grad_norm_`, with the optimizers in the same order on all ranks. ``group``: a
    further process group, whose ranks hold other parts of the model, as those of tensor parallelism do: their norm is
    included. What several of them hold is counted several times. Raises ValueError, on all ranks of these optimizers,
    for optimizers that are not over the same ranks or model axes (a norm would not be the same on all ranks), and for a
    ``group`` that has other ranks of theirs, or of axes that are in the norm already: those on which parameters are
    DTensors, and those of ``norm_group``. Collective.
    """
    given = [each.inside for each in ([optimizers] if isinstance(optimizers, Face) else optimizers)]
    p = order_of(norm_type)
    if not given:
        raise ValueError(f"{CALL} needs at least one optimizer")
    refusal = _refusal(given, group)
    if isinstance(group, dist.ProcessGroup):
        refusal = _refusal_of_all(group, refusal)
    arguments = [p, float(max_norm), float(group is not None)]
    rows: list[tuple[Tensor, Tensor | None]] = []
    results = []
    for core in sorted(given, key=_ranks_of) if refusal else given:  # so that all tell each other in one order
        try:
            result = core.sync(SyncPoint.CLIP_TOGETHER, arguments, refusal or core.calls.refusal(CALL))
        except RuntimeError as error:
            if TOLD not in str(error):
                raise
            refusal = refusal or str(error)  # which the ranks of the other optimizers are told too
            continue
        results.append(result)
        rows += core.calls.rows(p, Asked(core.buckets))
    if refusal:
        raise ValueError(refusal if GO_ON in refusal else f"{refusal}. {GO_ON}")
    device = rows[0][0].device
    rows = [(limbs.to(device), None if factor is None else factor.to(device)) for limbs, factor in rows]
    if group is not None:
        rows = [(_over(group, limbs, p), factor) for limbs, factor in rows]
    norm, finite = norm_of(rows, p)
    double = any(core.calls.norm_dtype is torch.float64 for core in given)
    total = norm.to(torch.float64 if double else torch.float32)
    coefficient = clip_coefficient(total, float(max_norm))
    for core in given:
        core.calls.note_norm(total, p)
    if max_norm != math.inf:
        for core, result in zip(given, results, strict=True):
            core.calls.clip_together(result, coefficient.to(core.ranks.device))
    if error_if_nonfinite:
        check_finite(total, finite, p)
    return total


def _refusal(cores: Sequence[Core], group: Any) -> str:
    """What this rank finds by itself; empty if the norms of all are over the same ranks and model axes, and ``group``
    is over none of them.

    Another rank may find nothing, as one that has no optimizer over fewer ranks. So it is told in each optimizer.
    """
    ranks, first = _ranks_of(cores[0]), cores[0].grads.model
    for index, core in enumerate(cores):
        if (other := _ranks_of(core)) != ranks:
            return (
                f"{REFUSED}optimizer 0 is over ranks {list(ranks)}, optimizer {index} over ranks {list(other)}: their "
                "norms would not add up to the same on all ranks. Give both parameters to one optimizer over all ranks "
                "as param groups, those of fewer ranks with a process_group of their own (docs/meshes.md), or clip "
                "each optimizer by itself"
            )
        if (model := core.grads.model).axes != first.axes:
            return (
                f"{REFUSED}the norm of optimizer 0 is over {first}, that of optimizer {index} over {model}: one of "
                "them would be counted too often. Give both parameters on the same axes, as param groups of one "
                "optimizer, or the missing axis as norm_group if its ranks have parameters of their own"
            )
    if group is None:
        return ""
    if not isinstance(group, dist.ProcessGroup):
        return f"{REFUSED}group must be a ProcessGroup this process is in, got {group!r}"
    others = set(dist.get_process_group_ranks(group))
    if len(shared := sorted(others & set(ranks))) > 1:
        return (
            f"{REFUSED}group= has ranks {shared}, and the optimizers average gradients over ranks {list(ranks)}: what "
            "these have in common would be counted more than once. Leave group out, or pass one whose ranks have other "
            "parts of the model"
        )
    for axis in first.axes:
        if len(others.intersection(axis.ranks)) > 1:
            return (
                f"{REFUSED}group= has ranks of the axis {axis}, which the optimizers' norms are over already: leave "
                "group out"
            )
    return ""


def _ranks_of(core: Core) -> tuple[int, ...]:
    return ranks_of(core.ranks.given)


def _refusal_of_all(group: dist.ProcessGroup, refusal: str) -> str:
    """The same of all ranks of ``group``: collective until nobody refuses, and never after.

    They differ if ``group`` has two ranks of one optimizer beside one of another.
    """
    if group in _compared:
        return refusal
    found: list[Any] = [None] * group.size()
    with waiting(group):
        dist.all_gather_object(found, refusal, group=group)
    refusal = refusal or next(filter(None, found), "")
    if not refusal:
        _compared.add(group)
    return refusal


def _over(group: Any, limbs: Tensor, p: float) -> Tensor:
    """Summed over the ranks of another group too."""
    with waiting(group):
        dist.all_reduce(limbs, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
    return limbs
