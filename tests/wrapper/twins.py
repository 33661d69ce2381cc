"""A script under torch's DistributedDataParallel and AdamW, and with only these two names changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

import zerox

# Beside torch's reducer, which divides before it sums: equal numbers of ranks that are powers of 2 give equal bits.
ATOL = 1e-6
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Script:
    """What a script imports. ``rank``: which seeds its model and its data."""

    rank: int
    wrap: Callable[..., Any]
    optimizer: Callable[..., Any]
    is_ours: bool = True

    def net(self, width: int = 32) -> nn.Sequential:
        torch.manual_seed(self.rank)
        return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1))

    def data(self, seed: int = 0) -> Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 + self.rank + 10 * seed))

    def train(self, model: nn.Module, *optimizers: Any, steps: int = 2, seed: int = 0) -> None:
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.loss(model, seed + step).backward()
            for optimizer in optimizers:
                optimizer.step()

    def loss(self, model: nn.Module, seed: int = 0) -> Tensor:
        found: Tensor = model(self.data(seed)).square().mean()
        return found


Case = Callable[[Script], Sequence[Tensor]]


def values_of(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def of_torch(rank: int) -> Script:
    return Script(rank, OfTorch, torch.optim.AdamW, is_ours=False)


def of_zerox(rank: int, stage: int, **options: Any) -> Script:
    return Script(rank, zerox.DistributedDataParallel, partial(zerox.FusedShardedAdam, stage=stage, **options))


def with_both(
    rank: int, world_size: int, cases: Mapping[str, Case], stages: Iterable[int] = STAGES
) -> dict[str, list[list[Tensor]]]:
    """What each case returns: under torch, then in each stage."""
    found = {}
    for name, case in cases.items():
        scripts = [of_torch(rank), *(of_zerox(rank, stage) for stage in stages)]
        found[name] = [[each.detach().double() for each in case(script)] for script in scripts]
    return found


def assert_same(found: Sequence[dict[str, list[list[Tensor]]]], name: str) -> None:
    """On each rank as under torch there, in each stage."""
    for rank, of_rank in enumerate(found):
        expected, *ours = of_rank[name]
        assert expected, "nothing is compared"
        for stage, values in zip(STAGES, ours, strict=True):
            where = f"{name}, stage {stage}, rank {rank}"
            assert len(values) == len(expected), where
            for value, other in zip(values, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=0, atol=ATOL, msg=lambda m, where=where: f"{where}: {m}")
