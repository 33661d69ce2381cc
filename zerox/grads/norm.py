"""The norm of the whole gradient from all ranks' shards, and the scale that clips it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zerox import ops
from zerox._C import Combine
from zerox.grads.asked import Asked
from zerox.grads.grads import Grads


def shard_limbs(shard: Tensor, segments: Tensor, p: float, mask: Tensor | None = None) -> Tensor:
    """The exact sum (int64 ``[EXACT_LIMBS]``) of one shard's norm, over what ``mask`` keeps."""
    limbs = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=shard.device)
    ops.norm_(limbs, shard, segments, p, mask)
    return limbs


def limbs_of(grads: Grads, p: float, asked: Asked) -> Iterator[tuple[int, Tensor, bool]]:
    """The sum of each part of this rank's shards that it counts, with its bucket, and whether it was made here.

    Others are those that the reduction left, as they are.

    ``asked``: see :class:`zerox.grads.asked.Asked`.
    """
    for index in range(grads.manager.num_buckets):
        if not grads.counts[index]:
            continue
        limbs = grads.limbs(index) if p == 2.0 and asked.has_all else None
        if limbs is not None:
            yield index, limbs, False
            continue
        for part in grads.parts(index):
            segments = asked.segments(index, part)
            if segments.shape[0] > 0:
                yield index, shard_limbs(part.grad, segments, p, part.mask), True


def total_limbs(
    grads: Grads,
    p: float,
    asked: Asked,
    divisors: Sequence[object],
    rows: Iterable[tuple[object, Tensor]] = (),
    known: Collection[object] = (),
) -> list[Tensor]:
    """The exact sums (int64 ``[EXACT_LIMBS]``) over all shards of all ranks: one for each divisor. Collective.

    Over model axes too: what is the same along an axis is counted by the rank of coordinate 0 there.

    ``divisors``: each bucket's; ``rows``: sums of tables' gradients, with the divisor of each. Those of one divisor are
    summed together, in the order of the ``known`` ones. No bucket size, and no number of ranks, shows in exact sums.
    """
    found: dict[object, list[Tensor]] = {divisor: [] for divisor in known or divisors or [None]}
    all_made = True
    for index, limbs, is_made in limbs_of(grads, p, asked):
        found[divisors[index]].append(limbs)
        all_made &= is_made
    for divisor, limbs in rows:
        found[divisor].append(limbs)
        all_made = False
    device = grads.ranks.device
    sums = [
        combine(each or [torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=device)], p) for each in found.values()
    ]
    if len(sums) > 1:
        total = torch.stack(sums)
    else:
        is_new = all_made or len(next(iter(found.values()))) > 1
        total = sums[0] if is_new else sums[0].clone()  # the reduction's own stay as they are
    grads.all_reduce(total, Combine.MAX if math.isinf(p) else Combine.SUM)
    grads.model.all_reduce(total, largest=math.isinf(p))
    return [total] if len(sums) == 1 else list(total)


def combine(limbs: Sequence[Tensor], p: float) -> Tensor:
    """One exact sum of several."""
    if len(limbs) == 1:
        return limbs[0]
    together = torch.stack(list(limbs))
    return together.amax(0) if math.isinf(p) else together.sum(0)


def order_of(norm_type: float) -> float:
    """ValueError for an order that no norm has."""
    p = float(norm_type)
    if not p > 0.0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    return p


def norm_of(rows: Sequence[tuple[Tensor, Tensor | None]], p: float) -> tuple[Tensor, Tensor]:
    """The norm over exact sums, each with what its elements will be multiplied by (None: 1), and whether all elements
    are finite, as float64 scalars."""
    if len(rows) == 1:
        limbs, factor = rows[0]
        norm, finite = torch.unbind(ops.norm_value(limbs, p))
        return (norm if factor is None else norm * factor.abs()), finite
    plain = [limbs for limbs, factor in rows if factor is None]
    value = ops.norm_value(combine(plain or [torch.zeros_like(rows[0][0])], p), p)
    found = [(ops.norm_value(limbs, p), factor) for limbs, factor in rows if factor is not None]
    if not found:
        return value[0], value[1]
    finite = torch.stack([value[1], *(each[1] for each, _ in found)]).amin()
    return torch.linalg.vector_norm(
        torch.stack([value[0], *(each[0] * factor.abs() for each, factor in found)]), p
    ), finite


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))`` in the norm's dtype, as torch.nn.utils.clip_grads_with_norm_ computes it."""
    # In place, and as torch divides a number by a tensor.
    return (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)


def check_finite(total: Tensor, finite: Tensor, p: float) -> None:
    """RuntimeError, as torch.nn.utils.clip_grad_norm_, if the norm or the gradients (``finite``) are not finite."""
    if not (bool(finite) and bool(total.isfinite())):
        raise RuntimeError(
            f"The total norm of order {p} for gradients is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
