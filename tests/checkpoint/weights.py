"""A model with every kind of weight that there is, trained by ranks in every way in which they may lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.meshes import mesh_once
from zerox import FusedShardedAdam, sparse_params


class Everything(nn.Module):
    """Large and small, tied, empty, of one element, channels last, frozen, tables, and buffers of three dtypes."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, table: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(6, 20, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.embed = nn.Embedding(130, 72)
            self.inner = nn.Linear(72, 129)
            self.frozen = nn.Linear(70, 90).requires_grad_(False)
            self.gain = nn.Parameter(torch.randn(()))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.outer = nn.Linear(129, 72)
            self.norm = nn.BatchNorm1d(72)
            self.head = nn.Linear(72, 130, bias=False)
            self.rows = nn.Embedding(300, 12, sparse=True) if table else None
            self.small = nn.Embedding(70, 12, sparse=True) if table else None
            for buffer in self.norm.buffers():
                buffer.copy_(torch.randint(1, 9, buffer.shape))
            self.register_buffer("passing", torch.randn(3), persistent=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.embed(ids)))
        x = self.head(self.norm(self.outer(x))) * self.gain
        found = x.float().square().mean() + self.conv.weight.float().square().sum() * 1e-2
        if self.rows is not None and self.small is not None:
            found = found + (self.rows(ids).float() * self.small(ids % 70).float()).square().sum()
        return found


@dataclass(frozen=True)
class Case:
    stage: int = 2
    dtype: torch.dtype = torch.float32
    exchange: str = ""
    mesh: bool = False  # of two times two ranks
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def has_tables(self) -> bool:
        return not (self.mesh and self.stage == 3)


BF16 = torch.bfloat16
CASES = {
    "stage 1": Case(1),
    "stage 2": Case(2),
    "stage 3": Case(3),
    "by message": Case(3, exchange="messages"),
    "native": Case(2, exchange="native"),
    "remainders": Case(2, BF16, options=(("master_weights", "remainder"),)),
    "remainders, sharded": Case(3, BF16, options=(("master_weights", "remainder"),)),
    "masters": Case(1, BF16, options=(("master_weights", "fp32"),)),
    "no masters": Case(3, torch.float16, options=(("master_weights", None), ("accumulate_dtype", torch.float32))),
    "8 bits": Case(2, options=(("state_dtype", "8bit"),)),
}
MESHES = {
    "two levels": Case(2, mesh=True),
    "two levels, sharded": Case(3, mesh=True),
    "two levels, by message": Case(3, exchange="messages", mesh=True),
    "two levels, remainders": Case(3, BF16, mesh=True, options=(("master_weights", "remainder"),)),
}


@contextlib.contextmanager
def exchanging(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if way:
            patch.setenv("ZEROX_EXCHANGE", way)
        yield


def optimizer_of(model: Everything, case: Case) -> FusedShardedAdam:
    tables = sparse_params(model)
    of_tables = {id(param) for param in tables}
    named = [each for each in model.named_parameters() if id(each[1]) not in of_tables]
    groups: list[dict[str, Any]] = [{"params": named}]
    if tables:
        own = [each for each in model.named_parameters() if id(each[1]) in of_tables]
        groups.append({"params": own, "sparse": True, "weight_decay": 0.0})
    mesh = mesh_once((2, 2), ("replicate", "shard")) if case.mesh else None
    options = {"lr": 1e-2, "bucket_cap_mb": 0.03, **dict(case.options)}
    return FusedShardedAdam(groups, stage=case.stage, process_group=mesh, **options)


def made(case: Case, seed: int) -> tuple[Everything, FusedShardedAdam]:
    with exchanging(case.exchange):
        model = Everything(seed, case.dtype, case.has_tables)
        return model, optimizer_of(model, case)


def step(model: Everything, optimizer: FusedShardedAdam, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    model(torch.randint(0, 130, (8,), generator=generator)).backward()
    optimizer.step()
    optimizer.zero_grad()


def contents(model: nn.Module) -> dict[str, Tensor]:
    """All of state_dict(), as it is now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
