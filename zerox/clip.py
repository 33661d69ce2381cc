"""The norm of the whole gradient from everybody's shards, and the scale that clips it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from zerox import ops
from zerox._C import Combine
from zerox.grads import Grads


def shard_words(shard: Tensor, segments: Tensor, p: float) -> Tensor:
    """The exact sum (int64 ``[EXACT_WORDS]``) of one shard's norm."""
    words = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=shard.device)
    ops.norm_(words, shard, segments, p)
    return words


def total_norm(grads: Grads, words: Iterable[Tensor], p: float) -> tuple[Tensor, Tensor]:
    """The norm over all shards of all ranks and whether every element is finite, as float64 scalars. Collective.

    The sums are exact, so neither bucket sizes nor the number of ranks show in the result.
    """
    total = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=grads.ranks.device)
    for each in words:
        total = torch.maximum(total, each) if math.isinf(p) else total + each
    grads.all_reduce(total, Combine.MAX if math.isinf(p) else Combine.SUM)
    value = ops.norm_value(total, p)
    return value[0], value[1]


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))`` in the norm's dtype, as torch.nn.utils.clip_grads_with_norm_ computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class GradScale:
    """What clip_grad_norm_() leaves for the next step(): the factor for all gradients, a float64 scalar on ``device``.

    ``value`` is None where it is 1, but not with ``keeps_place``: then it has one address, for CUDA graphs.
    """

    def __init__(self, device: torch.device, keeps_place: bool) -> None:
        self.keeps_place = keeps_place
        self.value = torch.ones((), dtype=torch.float64, device=device) if keeps_place else None
        self.num_launched: int | None = None  # flights launched when it was set

    def multiply(self, coefficient: Tensor, num_launched: int) -> None:
        if self.value is None:
            self.value = coefficient.double()
        elif self.keeps_place:
            self.value.mul_(coefficient)
        else:
            self.value = coefficient.double() * self.value
        self.num_launched = num_launched

    def check(self, num_launched: int) -> None:
        """RuntimeError if flights were launched since the scale was set."""
        if self.num_launched not in (None, num_launched):
            raise RuntimeError(
                "gradients were sent between clip_grad_norm_() and step(): the scale of the first can't be told from "
                "that of the others any more. Clip after the last backward, or call zero_grad()"
            )

    def reset(self) -> None:
        if self.keeps_place:
            assert self.value is not None
            self.value.fill_(1.0)
        else:
            self.value = None
        self.num_launched = None
