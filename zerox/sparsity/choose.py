"""Which elements are kept from now on: chosen by values alone, so the same at any number of ranks, in any buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zerox.memory.one_param import OneParam
from zerox.sparsity.select import Keys, keys_of, kth_smallest
from zerox.sparsity.shards import values_of

AddUp = Callable[[Tensor], None]


@dataclass(frozen=True)
class Pool:
    """Elements that are ranked together: those of ``owns``, of which ``to_mask`` shall be masked and ``masked`` are."""

    owns: Sequence[int]  # places in the list of all
    numel: int
    masked: int
    to_mask: int


def by_magnitude(
    owns: Sequence[OneParam], kept: Sequence[Tensor], pools: Sequence[Pool], add_up: AddUp
) -> list[Tensor]:
    """The smallest of the elements that are kept are masked too, equal ones together. None that is masked grows."""
    weights = [partial(_weights, own, mask) for own, mask in zip(owns, kept, strict=True)]
    inside = [[weights[i] for i in pool.owns] for pool in pools]
    limits = kth_smallest(inside, [pool.to_mask - pool.masked for pool in pools], add_up)
    limit_of = {i: limit for pool, limit in zip(pools, limits, strict=True) for i in pool.owns}
    return [
        mask & (keys_of(values_of(own)) > limit_of[i]) for i, (mask, own) in enumerate(zip(kept, owns, strict=True))
    ]


def by_renewal(
    owns: Sequence[OneParam],
    kept: Sequence[Tensor],
    pools: Sequence[Pool],
    scores: Sequence[Keys],
    fraction: float,
    add_up: AddUp,
) -> list[Tensor]:
    """Of the elements that are masked, those with the highest ``scores`` (keys, 0: never) grow, and make up for a
    ``fraction`` of the kept ones, the smallest, which are dropped. Each pool is one of ``owns``.

    Of equal scores at the limit none grows, and of equal weights at theirs all are dropped.
    """
    masked = [[partial(_mask_scores, score, mask)] for score, mask in zip(scores, kept, strict=True)]
    wanted = [min(int(fraction * (pool.numel - pool.masked)), pool.masked) for pool in pools]
    limits = kth_smallest(masked, [pool.masked - count for pool, count in zip(pools, wanted, strict=True)], add_up)
    grown = [
        ~mask & (score() > max(limit, 0)) & (count > 0)
        for mask, score, limit, count in zip(kept, scores, limits, wanted, strict=True)
    ]
    num_grown = torch.tensor([int(each.sum()) for each in grown], device="cpu")
    add_up(num_grown)
    to_drop = [p.to_mask - p.masked + count for p, count in zip(pools, num_grown.tolist(), strict=True)]
    weights = [[partial(_weights, own, mask)] for own, mask in zip(owns, kept, strict=True)]
    limits = kth_smallest(weights, to_drop, add_up)
    return [
        (mask & (keys_of(values_of(own)) > limit)) | more
        for mask, own, limit, more in zip(kept, owns, limits, grown, strict=True)
    ]


def _weights(own: OneParam, kept: Tensor) -> Tensor:
    return keys_of(values_of(own))[kept]


def _mask_scores(scores: Keys, kept: Tensor) -> Tensor:
    return scores()[~kept]


def by_pattern(own: OneParam, keeps: int, of: int) -> Tensor:
    """Of each ``of`` neighbours the ``keeps`` largest, of equal ones the first."""
    groups = keys_of(values_of(own)).view(own.own_numel // of, of)
    order = groups.argsort(dim=1, descending=True, stable=True)[:, :keeps]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True).view(-1)
