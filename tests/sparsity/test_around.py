"""Masks beside what else a training does: hidden gathers, loss scaling, accumulation, new parameters, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from tests.sparsity.trained import Case, batch, model, optimizer_of, params_of, train, twin
from zerox import Sparsity

TARGETS = {"0.weight": 0.5, "2.weight": 0.9}


def test_hidden_gathers_bring_masked_parameters() -> None:
    case = Case(schedule=("cubic", 1, 7, 2))
    found = run_ranks(train, 3, case, 2, True)[0]
    for step, params in enumerate(twin(case, found).params):
        for name, value in params.items():
            assert torch.equal(found.params[step][name], value), f"step {step}: {name}"


def skips(rank: int, world: int) -> list[bool]:
    module = model()
    optimizer = optimizer_of(Case(), module)
    sparsity = Sparsity(optimizer, TARGETS)
    scaler = zerox.GradScaler(device="cpu", init_scale=8.0)
    before = params_of(module)
    scaler.scale(module(batch(rank, world, 0, torch.float32)).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    sparsity.step()
    optimizer.zero_grad()
    same = [torch.equal(before[name], value) for name, value in params_of(module).items()]
    scaler.scale(module(batch(rank, world, 1, torch.float32)).sum()).backward()
    scaler.step(optimizer)
    sparsity.step()
    kept = sparsity.masks()
    return [*same, *(not module.get_parameter(name)[~kept[name]].any() for name in TARGETS)]


def accumulates(rank: int, world: int) -> list[bool]:
    module = model()
    optimizer = optimizer_of(Case(), module, stage=1)
    sparsity = Sparsity(optimizer, TARGETS, zerox.rigl(0.3, every=3))
    for step in range(3):
        with optimizer.no_sync():
            module(batch(rank, world, step, torch.float32)).sum().backward()
        module(batch(rank, world, step, torch.float32)).sum().backward()
        optimizer.step()
        sparsity.step()
        dense = module[0].weight.grad
        optimizer.zero_grad()
    kept = sparsity.masks()
    reached = [abs(value - TARGETS[name]) < 1e-3 for name, value in sparsity.sparsity().items()]
    assert dense is not None
    return [bool(dense[~kept["0.weight"]].any()), *reached, not module[0].weight[~kept["0.weight"]].any()]


def grows(rank: int, world: int) -> list[bool]:
    module = model()
    module[4].weight.requires_grad_(False)
    optimizer = optimizer_of(Case(), module)
    sparsity = Sparsity(optimizer, {"*.weight": 0.5})
    assert sparsity.matched == {"*.weight": ["0.weight", "2.weight"]}
    added = nn.Linear(12, 12)
    optimizer.add_param_group({"params": list(added.named_parameters())})
    module[4].weight.requires_grad_(True)
    for step in range(2):
        added(module(batch(rank, world, step, torch.float32))).sum().backward()
        optimizer.step()
        sparsity.step()
        optimizer.zero_grad()
    whole = [bool((value != 0).all()) for value in (module[4].weight, added.weight)]
    return [*whole, not module[0].weight[~sparsity.masks()["0.weight"]].any()]


def weighs(rank: int, world: int) -> list[bool]:
    module = nn.Linear(512, 512, bias=False)
    optimizer = zerox.FusedShardedAdam(module.named_parameters())
    before = optimizer.memory_bytes().moments
    sparsity = Sparsity(optimizer, {"weight": 0.5})
    more = optimizer.memory_bytes().moments - before
    sparsity.remove()
    return [more == 512 * 512 // world // 8 + 4, optimizer.memory_bytes().moments == before]


def is_estimated(rank: int, world: int) -> list[bool]:
    """In several buckets, of which one has no mask."""
    found = []
    for options in ({}, {"state_dtype": "8bit"}, {"bucket_cap_mb": 0.01}, {"stage": 3}):
        module = model()
        optimizer = optimizer_of(Case(), module, **options)
        Sparsity(optimizer, TARGETS)
        told = zerox.estimate(model().named_parameters(), world, masks=TARGETS, **options)
        dense = zerox.estimate(model().named_parameters(), world, **options)
        found.append(told.moments == optimizer.memory_bytes().moments)
        found.append(told.peak - dense.peak == told.moments - dense.moments > 0)
    return found


@pytest.mark.parametrize("function", [skips, accumulates, grows, weighs, is_estimated])
def test_masks_hold_beside(function: Callable[..., Any]) -> None:
    for found in run_ranks(function, 2):
        assert found
        assert all(found)


def test_an_estimate_of_masks_that_can_t_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"masks: '\*.bias' stands for no parameter that can be masked"):
        zerox.estimate(model().named_parameters(), 2, masks="*.bias")
    with pytest.raises(NotImplementedError, match="does not go with ShardedOptimizer"):
        zerox.estimate(model().named_parameters(), 2, masks="0.weight", optimizer_class=torch.optim.SGD, lr=0.1)
    module = model()
    module[2].double()  # beside it, others may be masked
    assert zerox.estimate(module.named_parameters(), 2, masks="0.weight").moments > 0
    with pytest.raises(ValueError, match=r"masks: '2.weight' stands for no parameter that can be masked"):
        zerox.estimate(module.named_parameters(), 2, masks="2.weight")
