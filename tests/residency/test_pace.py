"""Backward waits for a rank that is late, so that gradients are few: Note [Backward at the pace of the exchange]."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.residency.rig import build, run_by_way
from zerox import _C as C

LAYERS, WIDTH = 30, 64
LATE_S = 3
SOON_S = 30  # half of the patience that the pass begins with


def deep(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def made_until_the_other_came(rank: int, world_size: int) -> int:
    """How many gradients rank 0 has made after some seconds, in which rank 1 has not begun its backward."""
    model = deep()
    optimizer = build(model, bucket_cap_mb=0.02)
    store, made = dist.group.WORLD.get_group_store(), [0]

    def count(_: Tensor) -> None:
        made[0] += 1

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    found: list[int] = []

    def look() -> None:
        time.sleep(LATE_S)
        found.append(made[0])
        store.set("looked", "1")

    if rank == 0:
        looking = threading.Thread(target=look)
        looking.start()
    else:
        store.wait(["looked"])
    loss.backward()
    optimizer.step()
    if rank == 0:
        looking.join()
    assert made[0] == LAYERS
    return found[0] if rank == 0 else 0


def test_gradients_wait_for_a_rank_that_is_late() -> None:
    assert 1 <= run_ranks(made_until_the_other_came, 2)[0] <= 4


def in_other_orders(rank: int, world_size: int) -> float:
    models = [deep(), deep(1)]
    optimizers = [build(model, bucket_cap_mb=0.02) for model in models]
    for optimizer in optimizers:
        C.wait_until_awaited(optimizer.inside.grads.manager.backward, timedelta(seconds=1))
    losses = [model(torch.ones(2, WIDTH)).square().mean() for model in models]
    start = time.monotonic()
    for index in (0, 1) if rank == 0 else (1, 0):
        losses[index].backward()
    for optimizer in optimizers:
        optimizer.step()
    return time.monotonic() - start


def test_backwards_of_two_optimizers_in_other_orders_go_on() -> None:
    assert max(run_ranks(in_other_orders, 2)) < SOON_S


def while_the_other_has_written(rank: int, world_size: int) -> float:
    """Rank 1 writes, and waits for what rank 0 does after its backward."""
    model = deep()
    optimizer = build(model, bucket_cap_mb=0.02)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    start = time.monotonic()
    if rank == 1:
        with torch.no_grad():
            old = model[0].weight.clone()
            model[0].weight.zero_()
            model[0].weight.copy_(old)
    loss.backward()
    took = time.monotonic() - start
    optimizer.step()
    return took


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_backward_goes_on_at_once_where_another_rank_has_written_and_waits(way: str) -> None:
    assert run_ranks(run_by_way, 2, way, while_the_other_has_written)[0] < SOON_S


def while_the_other_has_no_backward(rank: int, world_size: int) -> float:
    """Rank 1 has nothing to train on in the second step."""
    model = deep()
    optimizer = build(model, bucket_cap_mb=0.02)
    took = 0.0
    for number in range(2):
        start = time.monotonic()
        if rank == 0 or number == 0:
            model(torch.ones(2, WIDTH)).square().mean().backward()
        took = time.monotonic() - start
        optimizer.step()
        optimizer.zero_grad()
    return took


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_backward_goes_on_where_another_rank_has_none_in_this_step(way: str) -> None:
    assert run_ranks(run_by_way, 2, way, while_the_other_has_no_backward)[0] < SOON_S
