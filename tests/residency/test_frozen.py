"""Frozen parameters are sharded too, and may be unfrozen, frozen, moved, and added while they are released."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.residency.models import Gpt, entropy
from tests.residency.rig import (
    assert_as_in_stage_2,
    assert_same,
    batch,
    build,
    made,
    residents,
    run_by_way,
    train,
    values,
)
from zerox import FusedShardedAdam

FROZEN = "blocks"


def frozen_model() -> nn.Module:
    torch.manual_seed(0)
    model = Gpt()
    model.get_submodule(FROZEN).requires_grad_(False)
    return model


def unfreeze(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    model.get_submodule("blocks.1").requires_grad_(True)


def freeze(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    model.get_parameter("norm.weight").requires_grad_(False)


def add(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    torch.manual_seed(3)
    model.added = nn.Linear(8, 8)
    model.register_forward_hook(lambda module, _, out: out + module.added.weight.sum() * 1e-3)
    optimizer.add_param_group({"params": list(model.added.named_parameters()), "lr": 0.5})


def move(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    for param in model.parameters():
        param.data = param.detach().clone()


def transpose(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    one, other = model.get_parameter("blocks.0.up.weight"), model.get_parameter("blocks.1.up.weight")
    one.data, other.data = other.data, one.data


def exchange(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    """Two that are trained: each lies in the other's home."""
    one, other = model.get_parameter("norm.weight"), model.get_parameter("norm.bias")
    one.data, other.data = other.data, one.data


def share(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    model.get_submodule("norm").share_memory()


def cast_and_back(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    model.double().float()


CHANGES: dict[str, Callable[[nn.Module, FusedShardedAdam], None]] = {
    each.__name__: each for each in (unfreeze, freeze, add, move, transpose, exchange, share, cast_and_back)
}


def change(rank: int, world_size: int, name: str) -> None:
    def run(stage: int) -> list[Tensor]:
        model = frozen_model()
        optimizer = build(model, stage, hostile=True)
        seen = train(model, optimizer, rank, entropy, steps=2)
        CHANGES[name](model, optimizer)
        seen += values(model)
        return [*seen, *train(model, optimizer, rank, entropy, steps=2)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_as_in_stage_2(name: str, world_size: int) -> None:
    run_ranks(change, world_size, name)


def frozen_bytes(rank: int, world_size: int) -> tuple[int, int, int]:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)), nn.Linear(256, 8))
    for layer in model[:-1]:
        layer.requires_grad_(False)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, bucket_cap_mb=0.25, resident_mb=0.5)
    residents(optimizer).release_all()
    whole = sum(param.nbytes for param in model.parameters())
    return optimizer.memory_bytes().parameters, whole, len(optimizer.inside.buckets)


def test_frozen_parameters_take_a_share_of_their_bytes() -> None:
    for lasting, whole, num_trained in run_ranks(frozen_bytes, 4):
        assert num_trained == 1
        assert whole / 4 <= lasting < whole / 4 + 32 * 1024  # less: those that are frozen would be nowhere


def several(rank: int, world_size: int) -> None:
    def run(stage: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Gpt()
        blocks = model.get_submodule("blocks")
        others = [(n, p) for n, p in model.named_parameters() if not n.startswith("blocks")]
        one = build(blocks, stage, hostile=True)
        other = FusedShardedAdam(others, lr=1e-3, stage=stage)
        for step in range(3):
            entropy(model, batch(step, rank)).backward()
            one.step()
            other.step()
            one.zero_grad()
            other.zero_grad()
        del one, other
        with torch.no_grad():
            return [entropy(model, batch(9, rank)), *values(model)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_several_optimizers_and_what_a_deleted_one_leaves(way: str) -> None:
    run_ranks(run_by_way, 2, way, several)


def deleted_at_other_times(rank: int, world_size: int) -> list[Tensor]:
    model, optimizer = made(hostile=True)
    train(model, optimizer, rank, entropy)
    expected = values(model)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        assert_same(values(model), expected)
    del optimizer
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # on nobody else's account
    dist.barrier()
    return values(model)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_ranks_delete_their_optimizers_at_other_times(way: str) -> None:
    first, second = run_ranks(run_by_way, 2, way, deleted_at_other_times)
    assert_same(first, second)
