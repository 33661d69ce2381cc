"""A model whose gradients are products of elements. Unlike matrix products they have the same bits on every CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ROWS, WIDTH = 130, 8  # of the table
NUM_IDS = 40
SHAPES = {
    "inner.weight": (72, 65),  # large enough for 8-bit moments, as those of the branch are
    "inner.bias": (65,),
    "gain": (),
    "twice.weight": (36, 36),
    "branch.weight": (70, 61),
    "branch.bias": (3,),
    "unused.weight": (5, 7),
}


def sixteenths(shape: Sequence[int], seed: int, most: int = 32) -> Tensor:
    """Float32 multiples of 1/16 between -``most`` / 16 and it, none of them 0: all dtypes hold them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, most + 1, tuple(shape), generator=generator)
    signs = torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1
    return (found * signs).float() / 16


class Leaf(nn.Module):
    """Some of ``SHAPES``: those whose names begin with ``name``."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        for number, (full, shape) in enumerate(SHAPES.items()):
            if full.partition(".")[0] == name:
                values = sixteenths(shape, 100 * seed + number)
                self.register_parameter(full.rpartition(".")[2], nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: of at least as many elements as the largest parameter has."""
        return torch.stack(
            [(x[: p.numel()].view(p.shape).to(p.dtype) * p * p).float().sum() for p in self.parameters(recurse=False)]
        ).sum()


class Products(nn.Module):
    """A scalar, a parameter that is used twice, a branch that some batches don't take, one that none takes, and, if
    asked for, a table whose gradients are rows."""

    def __init__(self, seed: int, with_table: bool = False) -> None:
        super().__init__()
        for name in dict.fromkeys(full.partition(".")[0] for full in SHAPES):
            if name != "gain":
                self.add_module(name, Leaf(name, seed))
        self.gain = nn.Parameter(sixteenths((), seed).abs())
        if with_table:
            self.table = nn.Embedding(ROWS, WIDTH, sparse=True, _weight=sixteenths((ROWS, WIDTH), seed + 50))

    def forward(self, x: Tensor, branch: bool = False, ids: Tensor | None = None) -> Tensor:
        """A loss, in float32."""
        loss = self.inner(x) + (x[0].to(self.gain.dtype) * self.gain * self.gain).float()
        loss = loss + self.twice(x) + self.twice(x.flip(0))
        if branch:
            loss = loss + self.branch(x)
        if ids is not None:
            loss = loss + (self.table(ids) * x[:WIDTH].to(self.table.weight.dtype)).float().square().sum()
        return loss


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    numel = max(math.prod(shape) for shape in SHAPES.values())
    return sixteenths((numel,), 10_000 + 1000 * rank + 10 * step + micro, most=20)


def ids_of(rank: int, step: int) -> Tensor:
    """Rows: few different ones, which come often, on rank 0; none on rank 1 in step 1."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    count = 0 if (rank, step) == (1, 1) else NUM_IDS
    return torch.randint(0, 7 if rank == 0 else ROWS, (count,), generator=generator)
