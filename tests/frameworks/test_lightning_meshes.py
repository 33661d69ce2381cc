"""Lightning and Fabric with ``replicate_size=``, hybrid sharding, beside DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.frameworks.lightning_rig import Module, as_on_rank_0, data, difference, run, trainer, values
from tests.frameworks.test_fabric import adamw, loss_of, make_fabric, make_model, state_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.integrations.lightning import ZeroxFabricStrategy, ZeroxStrategy

TOLERANCE = 2e-7


def axes_of(optimizer: Any) -> list[int]:
    return [len(axis.members) for axis in optimizer.inside.ranks.axes]


def fit(rank: int, world_size: int) -> list[tuple[list[Tensor], bool, list[int]]]:
    found = []
    for strategy in ("ddp", ZeroxStrategy(stage=1, replicate_size=2), ZeroxStrategy(replicate_size=2)):
        module = Module()
        fitted = trainer(rank, world_size, strategy, gradient_clip_val=0.05)
        fitted.fit(module, data())
        axes = axes_of(fitted.strategy.sharding.optimizers[0]) if strategy != "ddp" else []
        found.append((values(module), as_on_rank_0(values(module)), axes))
    return found


def loop(rank: int, world_size: int) -> list[tuple[list[Tensor], list[int]]]:
    found = []
    for strategy in ("ddp", ZeroxFabricStrategy(replicate_size=2)):
        fabric = make_fabric(rank, world_size, strategy)
        model, optimizer = fabric.setup(*[(model := make_model(rank)), adamw(model)])
        for step in range(4):
            fabric.backward(loss_of(model, rank, step))
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append((state_of(model), axes_of(optimizer.optimizer) if strategy != "ddp" else []))
    return found


def test_a_module_trains_over_a_mesh_as_with_ddp() -> None:
    for ddp, *ours in run(fit, 4):
        for params, same, axes in ours:
            assert difference(params, ddp[0]) <= TOLERANCE
            assert same
            assert axes == [2, 2]


def test_a_loop_trains_over_a_mesh_as_with_ddp() -> None:
    for ddp, ours in run(loop, 4):
        assert difference(ours[0], ddp[0]) <= TOLERANCE
        assert ours[1] == [2, 2]


def misuse(rank: int, world_size: int) -> list[str]:
    said = []
    fits: list[tuple[Any, Any]] = [
        (ZeroxStrategy(replicate_size=3), None),
        (ZeroxStrategy(replicate_size=2), lambda params: FusedShardedAdam(params, lr=0.01)),
    ]
    for strategy, make in fits:
        try:
            trainer(rank, world_size, strategy).fit(Module(make), data())
        except ValueError as error:
            said.append(str(error))
    dist.barrier()
    torch.manual_seed(0)
    return said


def test_what_can_t_be_a_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="no process_group: it is over all ranks of the strategy; replicate_size="):
        ZeroxStrategy(process_group=None)
    for uneven, built in run_ranks(misuse, 4):
        assert "replicate_size=3 does not divide 4 ranks" in uneven
        assert "was given replicate_size, which is for optimizers of torch" in built
