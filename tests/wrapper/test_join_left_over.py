"""ddp.join() where optimizers of torch's hold parameters: such gradients are followed too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.ranks import run_ranks
from tests.wrapper.beside import data
from zerox import DistributedDataParallel, FusedShardedAdam

LAST = {2: (2, 5), 3: (4, 1, 2)}  # batches by rank, of two ranks and of three
FIRST = {2: (5, 2), 3: (1, 4, 0)}
EVEN = {2: (3, 3), 3: (2, 2, 2)}


class Net(nn.Module):
    """Statistics of the inputs, and a layer that one rank does not use in some step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, both: bool = True) -> Tensor:
        outputs = self.norm(inputs)
        return self.b(self.a(outputs)) if both else self.b(outputs)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def optimizers_of(net: nn.Module, kind: str, ours: bool) -> list[Any]:
    """``kind``: whose optimizers hold which layers."""
    held = [*net.norm.parameters(), *net.a.parameters()]
    rest = list(net.b.parameters())
    if kind == "torch's alone":
        return [adamw([*held, *rest])]
    sharded = FusedShardedAdam(held, lr=0.1, stage=int(kind[-1])) if ours else adamw(held)
    return [adamw(rest), sharded] if kind.startswith("torch's first") else [sharded, adamw(rest)]


KINDS = ("torch's alone", "ours first, stage 1", "torch's first, stage 2", "ours first, stage 3")


def trained(
    cls: Any, rank: int, counts: dict[int, tuple[int, ...]], kind: str, divide: bool, every: int, way: str
) -> list[Tensor]:
    """``every``: of so many backwards one is sent; 0: two are sent in a step, and p.grad holds the first mean still."""
    world = torch.distributed.get_world_size()
    torch.manual_seed(0)
    ddp = cls(Net(), find_unused_parameters=True)
    ours = cls is DistributedDataParallel
    optimizers = optimizers_of(ddp.module, kind, ours)
    if way == "ddp.join()":
        joined = ddp.join(divide_by_initial_world_size=divide)
    else:
        others = [each for each in optimizers if ours and isinstance(each, FusedShardedAdam) and way == "all in Join"]
        joined = Join([ddp, *others], divide_by_initial_world_size=divide)
    with joined:
        for step in range(max(every, 1) * counts[world][rank]):
            last = every == 0 or step % every == every - 1
            for _ in range(2 if every == 0 else 1):
                with nullcontext() if last else ddp.no_sync():
                    # Where no rank with a batch uses a layer, torch's has zeros for a gradient, and zerox none.
                    ddp(data(rank, step), rank != step or step >= min(counts[world])).exp().mean().backward()
            if last:
                for optimizer in optimizers if step % 2 else reversed(optimizers):
                    optimizer.step()
                ddp.zero_grad()
    sharded = [each for each in optimizers if isinstance(each, FusedShardedAdam)]
    with sharded[0].whole() if sharded else nullcontext():
        return [each.detach().clone() for each in (*ddp.module.parameters(), *ddp.module.buffers())]


CASES = [
    (counts, kind, divide, every, way)
    for kind in KINDS
    for counts, divide, every, way in (
        (LAST, True, 1, "ddp.join()"),
        (FIRST, True, 2, "ddp.join()"),
        (FIRST, False, 1, "ddp.join()"),
        (EVEN, True, 1, "ddp.join()"),
        (LAST, True, 1, "ddp in Join"),
        (FIRST, False, 1, "all in Join"),
    )
]
ADDED_UP = [(counts, "torch's alone", divide, 0, "ddp.join()") for counts in (LAST, FIRST) for divide in (True, False)]


def apart(rank: int, world_size: int) -> list[Any]:
    found = []
    for case in CASES + ADDED_UP:
        theirs = trained(OfTorch, rank, *case)
        ours = trained(DistributedDataParallel, rank, *case)
        if not all(torch.allclose(*each, atol=1e-6) for each in zip(ours, theirs, strict=True)):
            found.append(case)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_join_trains_as_torchs_with_optimizers_of_both(world_size: int) -> None:
    assert run_ranks(apart, world_size) == [[]] * world_size
