"""Cases of test_features.py in which a script works on p.grad by itself."""

from __future__ import annotations

from typing import Any

import torch


def with_torchs_scaler(training: Any, stage: int) -> None:
    """An inf on one rank. Each gradient is clipped by its own norm: a sum of norms has other bits on a device."""
    training.adam(stage=stage)
    scaler = torch.amp.GradScaler(training.device.type, init_scale=2.0**16, growth_interval=2)
    for step in range(6):
        loss = training.loss(step)
        scaler.scale(loss * (float("inf") if step == 2 and training.rank == 1 else 1.0)).backward()
        training.optimizer.synchronize()  # in stage 1 p.grad is the mean from here
        scaler.unscale_(training.optimizer)
        for weight in training.model.weights:
            assert weight.grad is not None
            weight.grad.mul_(0.05 / (weight.grad.norm() + 1e-6))
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**17


def with_operators_on_grads(training: Any, stage: int) -> None:
    """Between backwards, too, and on what a step has used."""
    training.adam(stage=stage)
    for step in range(6):
        for micro in range(2):
            training.backward(step, micro)
            training.optimizer.synchronize()
            torch.nn.utils.clip_grad_value_(training.model.parameters(), 0.02)
            first, *others = (weight.grad for weight in training.model.weights if weight.grad is not None)
            first.div_(torch.full((), 3.0, device=training.device))
            torch.nan_to_num_(first, 0.0)
            torch._foreach_mul_(others, 0.5)
            assert all(bool(torch.isfinite(each).all()) for each in (first, *others))
        training.optimizer.step()
        if step % 2:
            training.optimizer.zero_grad()
