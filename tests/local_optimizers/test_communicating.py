"""Classes that communicate by themselves are sent where they belong, before they have sent anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

from tests.ranks import run_ranks
from zerox import ShardedOptimizer


class Averaging(torch.optim.SGD):
    """Averages gradients itself. In a probe, in which all ranks have the same gradients, nothing shows."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        return super().step(closure)


class Gathering(torch.optim.SGD):
    """Each rank updates some parameters, and all get them."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                dist.broadcast(param.detach(), 0)
        return loss


CASES: dict[type[torch.optim.Optimizer], str] = {
    Averaging: r"Averaging can't be sharded: it communicates by itself \(allreduce_\).*Use it under DistributedData",
    Gathering: r"Gathering can't be sharded: it communicates by itself \(broadcast_\).*Use it under DistributedData",
    ZeroRedundancyOptimizer: "ZeroRedundancyOptimizer can't be sharded: it shards by itself. Give ShardedOptimizer the",
    PostLocalSGDOptimizer: "PostLocalSGDOptimizer can't be sharded: it averages parameters over the ranks by itself",
}


def refused(rank: int, world_size: int) -> list[str]:
    return [said_of(cls) for cls in CASES]


def said_of(cls: type[torch.optim.Optimizer]) -> str:
    for elementwise in (True, None):  # trusting the class does not make it right
        with pytest.raises(ValueError, match="can't be sharded") as raised:
            ShardedOptimizer([nn.Parameter(torch.ones(7, 3))], cls, elementwise=elementwise)
    return str(raised.value)


def test_a_class_that_communicates_by_itself_is_refused_and_sent_to_ddp() -> None:
    for found in run_ranks(refused, 2):
        for said, message in zip(found, CASES.values(), strict=True):
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(said)


def test_a_probe_s_own_tensors_are_not_taken_for_the_user_s() -> None:
    """The class's own words are about a tensor of one dimension that the user never had: and what helps is said."""
    with pytest.raises(
        ValueError, match=r"small tensors of zerox's own, 1-D as a rank's piece .*size: torch.Size"
    ) as it:
        ShardedOptimizer([nn.Parameter(torch.ones(7, 3))], torch.optim.Muon)
    assert ". Pass whole='matrices': parameters of two or more dimensions then lie whole" in str(it.value)
