"""NaN and inf in gradients without a scaler: as torch. Asked to raise, clipping leaves everything as it was."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import message_of, same_bits
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

VALUES = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
STAGES = pytest.mark.parametrize("stage", [1, 2])


def gradient_of(rank: int, step: int) -> Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(10 * step + rank))


def propagate(rank: int, world_size: int, stage: int, value: float) -> None:
    ours, theirs = (nn.Parameter(torch.ones(5000)) for _ in range(2))
    optimizer = FusedShardedAdam([ours], lr=1e-2, stage=stage)
    reference = torch.optim.AdamW([theirs], lr=1e-2, foreach=False)
    for step in range(3):
        grads = [gradient_of(r, step) for r in range(world_size)]
        if step == 1:
            grads[1][[0, 3000]] = value  # one for each rank to own
        (ours * grads[rank]).sum().backward()
        theirs.grad = torch.stack(grads).sum(0) / world_size
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.isnan().nonzero().flatten(), torch.tensor([0, 3000]))


@STAGES
@VALUES
def test_what_is_not_finite_goes_where_torch_s_adamw_takes_it_and_nowhere_else(stage: int, value: float) -> None:
    run_ranks(propagate, 2, stage, value)


def raise_in_clip(rank: int, world_size: int, stage: int, dtype: torch.dtype, value: float) -> None:
    params = [nn.Parameter(torch.ones(5000, dtype=dtype)), nn.Parameter(torch.ones(7, dtype=dtype))]
    optimizer = FusedShardedAdam(params, lr=1e-2, stage=stage, amsgrad=True, master_weights="auto")

    def backward(step: int, poison: bool = False) -> None:
        scale = gradient_of(rank, step).to(dtype)
        if poison:
            scale[0] = value
        ((params[0] * scale).sum() + (params[1] * 2.0).sum()).backward()

    def everything() -> list[Tensor]:
        state = [t for own in optimizer.state.values() for t in own.values()]
        whole = [p.grad for p in params] if stage == 1 else []
        return [t.detach().clone() for t in [*params, *state, *whole] if t is not None]

    backward(0)
    optimizer.step()  # moments, masters and steps are no longer zero
    optimizer.zero_grad()
    backward(1, poison=rank == 1)
    optimizer.synchronize()
    before = everything()
    for _ in range(2):
        message = message_of(lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True))
        assert "non-finite" in message
        assert "error_if_nonfinite=False" in message
    assert all(same_bits(a, b) for a, b in zip(everything(), before, strict=True))
    assert set(optimizer.inside.calls.scale.values.values()) == {None}, "a scale is left for the next step()"
    assert not optimizer.clip_grad_norm_(1.0).isfinite(), "the gradients are still there"
    optimizer.zero_grad()
    backward(2)
    assert optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True).isfinite()
    optimizer.step()
    assert all(p.isfinite().all() for p in params)


@STAGES
@VALUES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_that_raises_leaves_parameters_moments_masters_steps_and_gradients(
    stage: int, value: float, dtype: torch.dtype
) -> None:
    run_ranks(raise_in_clip, 2, stage, dtype, value)
