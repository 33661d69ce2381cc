"""A loop of Accelerate's with zerox.GradScaler: skipped steps are seen as of torch's own scaler and optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optimizer.models import batch, make_model, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler

STEPS, OVERFLOW = 5, 1


def loop(rank: int, world_size: int, kind: str, stage: int) -> tuple[list[bool], list[float], list[Tensor]]:
    """Of each step whether it was skipped, and the lr after it; the parameters at the end."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer: torch.optim.Optimizer
    if kind == "zerox":
        accelerator.scaler = GradScaler("cpu", init_scale=2.0**10)
        optimizer = FusedShardedAdam(model.parameters(), lr=1e-3, eps=1e-3, stage=stage)
    else:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    wrapped: Any
    scheduler: Any
    wrapped, scheduler = accelerator.prepare(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    skipped, lrs = [], []
    for step in range(STEPS):
        loss = model(batch(rank, step)).square().mean()
        accelerator.backward(loss * math.inf if step == OVERFLOW and rank == world_size - 1 else loss)
        if kind == "torch":
            for param in model.parameters():
                param.grad = mean_over_ranks(param.grad, param, world_size)
        wrapped.step()
        scheduler.step()
        wrapped.zero_grad()
        skipped.append(wrapped.step_was_skipped)
        lrs.append(optimizer.param_groups[0]["lr"])
    return skipped, lrs, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_sees_skipped_steps_on_all_ranks(world_size: int, stage: int) -> None:
    pytest.importorskip("accelerate")
    for ours, theirs in zip(*(run_ranks(loop, world_size, kind, stage) for kind in ("zerox", "torch")), strict=True):
        assert ours[0] == theirs[0] == [step == OVERFLOW for step in range(STEPS)]
        assert ours[1] == theirs[1]
        for p, q in zip(ours[2], theirs[2], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
