"""Around the class: its own options and step(), other optimizers of one model, forks, copies, deletion."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.local_optimizers.classes import NewKey, WithStepOptions
from tests.local_optimizers.test_redundancy_cases import close, loss_of, small
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer


def new_key(rank: int, world_size: int) -> list[Any]:
    """One parameter, of which rank 0 has all: what the class puts into its groups is in ours on every rank."""
    param = nn.Parameter(torch.ones(5))
    optimizer = ShardedOptimizer([param], NewKey, lr=0.1)
    param.grad = torch.ones(5)
    optimizer.step()
    return [optimizer.param_groups[0]["new_key"], float(param[0])]


def test_what_the_class_puts_into_its_groups_is_in_ours() -> None:
    assert run_ranks(new_key, 2) == [[0.1, pytest.approx(0.9)]] * 2


def step_options(rank: int, world_size: int) -> list[int]:
    heard: list[int] = []
    model = small()
    optimizer = ShardedOptimizer(model.parameters(), WithStepOptions, lr=0.1)
    loss_of(model).backward()
    optimizer.step(None, heard=heard)
    optimizer.step()
    return heard


def test_options_of_step_reach_the_class() -> None:
    assert run_ranks(step_options, 1) == [[1]]


def side_by_side(rank: int, world_size: int) -> bool:
    """A fused optimizer and a class of torch's, over halves of one model."""
    model, twin = small(), small()
    ours = [
        FusedShardedAdam(model[0].parameters(), lr=0.01),
        ShardedOptimizer(model[2].parameters(), torch.optim.NAdam, lr=0.01),
    ]
    theirs = [torch.optim.AdamW(twin[0].parameters(), lr=0.01), torch.optim.NAdam(twin[2].parameters(), lr=0.01)]
    for step in range(3):
        loss_of(model, rank, step).backward()
        torch.stack([loss_of(twin, each, step) for each in range(world_size)]).mean().backward()
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    return close(model, twin)


def test_two_kinds_of_optimizer_share_a_model() -> None:
    assert run_ranks(side_by_side, 2) == [True, True]


def forked(rank: int, world_size: int) -> tuple[str, bool]:
    """What step() says in a forked child; the parent trains on."""
    model = small()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loss_of(model).backward()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        heard = said.read()
    before = model[0].weight.detach().clone()
    optimizer.step()
    return heard, bool((model[0].weight != before).any())


def test_a_forked_child_may_not_step() -> None:
    for said, trains_on in run_ranks(forked, 2):
        assert "was forked from the one that built this optimizer" in said
        assert trains_on


def test_copies_are_refused_and_deletion_leaves_no_cycle() -> None:
    model = small()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adagrad)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(TypeError, match="ShardedOptimizer can't be copied or pickled"):
        copy.deepcopy(optimizer)
    local: Callable[[], Any] = weakref.ref(optimizer.inside.update.local[0].optimizer)  # type: ignore[attr-defined]
    outer = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert outer() is None
        assert local() is None
    finally:
        gc.enable()
