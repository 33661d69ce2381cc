"""Modules with tables, what they look up, and means over ranks, for tests of what is in no bucket."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

ATOL = 1e-6


def words(rank: int, step: int) -> Tensor:
    """Other rows on each rank, some of them on several, and some twice."""
    return torch.randint(0, 12, (3, 3), generator=torch.Generator().manual_seed(10 * step + rank))


class Tables(nn.Module):
    """Two tables, the first of which is of two modules, and a dense layer. ``looks``: a table that is not used is
    looked up in an empty batch, since torch's class raises where one has no gradient."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(12, 4, sparse=True, mode="sum")
        self.second = nn.Embedding(12, 4, sparse=True)
        self.layer = nn.Linear(4, 2)
        self.again = nn.EmbeddingBag(12, 4, sparse=True, mode="sum")
        self.again.weight = self.first.weight
        self.looks = looks

    def forward(self, x: Tensor, way: str = "first") -> Tensor:
        found = torch.zeros(3, 4)
        if way in ("first", "both"):
            found = found + self.first(x) + self.again(x.flip(0)).tanh()
        elif self.looks:
            found = found + self.first(x[:0]).sum()
        if way in ("second", "both"):
            found = found + self.second(x).sum(1)
        elif self.looks:
            found = found + self.second(x[:0]).sum()
        return self.layer(found.tanh())


def mean_of(grad: Tensor) -> Tensor:
    total = torch.view_as_real(grad.resolve_conj()).clone() if grad.is_complex() else grad.clone()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    return torch.view_as_complex(total) if grad.is_complex() else total


def tables_of(model: Tables) -> list[nn.Parameter]:
    return [model.first.weight, model.second.weight]
