"""Rows of tables that no optimizer of zerox holds, beside torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.ranks import run_ranks
from tests.wrapper.tables import ATOL, Tables, tables_of, words
from zerox import DistributedDataParallel, FusedShardedSGD

WAYS = {
    "other rows on each rank": ["both"] * 3,
    "a table that one rank lacks": ["both", "first if 0", "first if 0"],
    "a table that no rank uses": ["first", "second", "none"],
    "two backwards of each step": ["both, first", "second, both if 0"],
    "accumulated in no_sync": ["keep both, first", "keep second if 0, first"],
}


def way_of(said: str, rank: int) -> str:
    """``x if 0``: on rank 0 alone."""
    way, _, only = said.partition(" if ")
    return way if not only or rank == 0 else "none"


def trained(cls: Any, rank: int, steps: list[str], optimizers: Callable[[Any], list[Any]], looks: bool) -> list[Tensor]:
    """Gradients of tables after each step's backwards, and parameters after the last one."""
    torch.manual_seed(rank)
    ddp = cls(Tables(looks))
    made = optimizers(ddp.module)
    found: list[Tensor] = []
    for step, ways in enumerate(steps):
        for number, said in enumerate(ways.split(", ")):
            with ddp.no_sync() if said.startswith("keep ") else nullcontext():
                way = way_of(said.removeprefix("keep "), rank)
                ddp(words(rank, 3 * step + number), way).square().mean().backward()
        for table in (ddp.module.first, ddp.module.second):
            grad = table.weight.grad
            assert grad is None or (grad.is_sparse and grad.is_coalesced())
            found += [torch.zeros(12, 4) if grad is None else grad.to_dense()]
            found += [torch.zeros(1, 0, dtype=torch.int64) if grad is None else grad.indices().clone()]
        for each in made:
            each.step()
            each.zero_grad()
    with made[-1].whole() if hasattr(made[-1], "whole") else nullcontext():
        return found + [param.detach().clone() for param in ddp.parameters()]


OPTIMIZERS: dict[str, Callable[[Tables], list[Any]]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "SparseAdam": lambda model: [
        torch.optim.SparseAdam(tables_of(model), lr=0.1),
        torch.optim.SGD(model.layer.parameters(), lr=0.1),
    ],
}
for stage in (1, 2, 3):
    OPTIMIZERS[f"beside stage {stage}"] = lambda model, stage=stage: [
        torch.optim.SGD(tables_of(model), lr=0.1),
        FusedShardedSGD(model.layer.parameters(), lr=0.1, stage=stage),
    ]


def as_torchs(rank: int, world_size: int) -> dict[str, str]:
    """What differs from torch's class, by optimizers and ways."""
    found = {}
    for name, optimizers in OPTIMIZERS.items():
        of_torch = optimizers if name == "SparseAdam" else OPTIMIZERS["SGD"]
        for ways, steps in WAYS.items():
            expected = trained(OfTorch, rank, steps, of_torch, True)
            # SparseAdam counts a step for a gradient without rows.
            ours = trained(DistributedDataParallel, rank, steps, optimizers, name == "SparseAdam")
            for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
                if one.shape != other.shape or not torch.allclose(one, other, atol=ATOL):
                    found[f"{name}, {ways}, {index}"] = f"{one}, torch's {other}"
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_are_averaged_as_by_torchs(world_size: int) -> None:
    assert run_ranks(as_torchs, world_size) == [{}] * world_size
