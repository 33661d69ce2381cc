"""A whole step inside torch.compile: Dynamo compiles the user's code, and calls the optimizer as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler, ShardedOptimizer, clip_grad_norm_

MAKE: dict[str, Callable[[Any], Any]] = {
    "stage 1": lambda params: FusedShardedAdam(params, stage=1, bucket_cap_mb=0.01),
    "stage 2": lambda params: FusedShardedAdam(params, stage=2, bucket_cap_mb=0.01),
    "stage 3": lambda params: FusedShardedAdam(params, stage=3, bucket_cap_mb=0.01),
    "a class": lambda params: ShardedOptimizer(params, torch.optim.NAdam, bucket_cap_mb=0.01),
}
# The function up to backward(), what follows it, and what follows each call of ours, with torch's backward() itself.
MOST_FRAMES = 16


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))


def trained(kind: str, rank: int, compiled: bool) -> list[Tensor]:
    model = made()
    optimizer = MAKE[kind](model.parameters())
    scaler = GradScaler(init_scale=4.0, device="cpu")

    def step(x: Tensor, together: bool) -> Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if together:
            clip_grad_norm_(optimizer, 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    run = torch.compile(step, backend="eager") if compiled else step
    generator = torch.Generator().manual_seed(rank)
    losses = [run(torch.randn(8, 20, generator=generator), number > 3) for number in range(6)]
    with optimizer.whole():
        return [*losses, *(p.detach().clone() for p in model.parameters())]


def compared(rank: int, world_size: int, kind: str) -> tuple[bool, int]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (trained(kind, rank, each) for each in (False, True))
    same = all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    return same, counters["frames"]["total"]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_step_has_the_bits_of_one_that_is_not(world_size: int, kind: str) -> None:
    for same, frames in run_ranks(compared, world_size, kind):
        assert same
        assert 0 < frames <= MOST_FRAMES, "Dynamo looked into the optimizer"
