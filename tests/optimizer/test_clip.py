"""clip_grad_norm_: the norm of the whole mean gradient, and a scale that is applied inside step()."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.optimizer.models import backward, batch, make_model, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

EPS = 1e-3  # see test_torch_behaviour.py


def clip_and_compare(rank: int, world_size: int, stage: int, norm_type: float, max_norm: float) -> float:
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), lr=1e-2, eps=EPS, stage=stage, bucket_cap_mb=0.03)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=EPS, foreach=False)
    for step in range(3):
        backward(model, batch(rank, step), branch=rank == 1)
        backward(twin, batch(rank, step), branch=rank == 1)
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        norm = ours.clip_grad_norm_(max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
        torch.testing.assert_close(norm, expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    return float(norm)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_norm_and_clipped_step_are_torch_s(world_size: int, stage: int, norm_type: float, max_norm: float) -> None:
    norms = run_ranks(clip_and_compare, world_size, stage, norm_type, max_norm)
    assert len(set(norms)) == 1, "all ranks see the same norm, to the bit"


def test_clipping_twice_clips_what_was_clipped() -> None:
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), eps=EPS)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    backward(model, batch(0, 0))
    backward(twin, batch(0, 0))
    for max_norm in (0.1, 0.05, 1.0):
        norm = ours.clip_grad_norm_(max_norm)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), max_norm))
    ours.step()
    theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_scale_is_gone_after_step_and_after_zero_grad() -> None:
    def run(clip_first: bool) -> torch.Tensor:
        param = nn.Parameter(torch.ones(4))
        optimizer = FusedShardedAdam([param], lr=0.1, eps=1.0)
        if clip_first:
            param.grad = torch.full((4,), 100.0)
            optimizer.clip_grad_norm_(1e-3)
            optimizer.zero_grad()
        param.grad = torch.full((4,), 0.5)
        optimizer.step()
        return param.detach()

    assert torch.equal(run(True), run(False))


def nonfinite(rank: int, world_size: int, stage: int, value: float) -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    before = [p.detach().clone() for p in model.parameters()]
    model(batch(rank, 0)).mean().mul(value if rank == 0 else 1.0).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    norm = optimizer.clip_grad_norm_(1.0)
    assert not torch.isfinite(norm)
    optimizer.zero_grad()
    backward(model, batch(rank, 0))
    assert torch.isfinite(optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_nonfinite_norm_raises_on_all_ranks_and_changes_nothing(stage: int, value: float) -> None:
    run_ranks(nonfinite, 2, stage, value)


def test_squares_that_overflow_do_not_make_a_norm_infinite() -> None:
    param = nn.Parameter(torch.zeros(1000))
    optimizer = FusedShardedAdam([param])
    param.grad = torch.full((1000,), 1e30)
    norm = optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    torch.testing.assert_close(norm, torch.tensor(1e30 * math.sqrt(1000)))


def test_tiny_norms_are_clipped_by_torch_s_formula() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    ours = FusedShardedAdam(params[:1], lr=1e6, eps=1.0, weight_decay=0.0)
    theirs = torch.optim.AdamW(params[1:], lr=1e6, eps=1.0, weight_decay=0.0, foreach=False)
    for param in params:
        param.grad = torch.full((1,), 1e-6)  # as large as what torch adds to the norm
    ours.clip_grad_norm_(1e-6)
    nn.utils.clip_grad_norm_(params[1:], 1e-6)
    ours.step()
    theirs.step()
    torch.testing.assert_close(params[0], params[1])


def modify_whole_gradients(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), stage=1)
    backward(model, batch(rank, 0))
    before = optimizer.clip_grad_norm_(math.inf)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(2.0)
    torch.testing.assert_close(optimizer.clip_grad_norm_(math.inf), 2 * before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_modified_in_stage_1_is_what_counts(world_size: int) -> None:
    run_ranks(modify_whole_gradients, world_size)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_other_norms_are_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        FusedShardedAdam([nn.Parameter(torch.ones(1))]).clip_grad_norm_(1.0, norm_type)


def clip_then_backward(rank: int, world_size: int, max_norm: float, stage: int) -> str:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    backward(model, batch(rank, 0))
    optimizer.clip_grad_norm_(max_norm)
    backward(model, batch(rank, 1))
    try:
        optimizer.step()
    except RuntimeError as error:
        optimizer.zero_grad()
        backward(model, batch(rank, 2))
        optimizer.step()
        return str(error)
    return "stepped"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_after_clipping_is_refused_but_not_after_asking_for_the_norm(world_size: int, stage: int) -> None:
    for message in run_ranks(clip_then_backward, world_size, 0.1, stage):
        assert "gradients were added between clip_grad_norm_()" in message
    assert run_ranks(clip_then_backward, world_size, math.inf, stage) == ["stepped"] * world_size
