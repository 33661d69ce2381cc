"""zerox.GradScaler beside torch's: same steps, skipped on all ranks where one has an inf or NaN, in every stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.models import backward, batch, make_model, mean_over_ranks
from tests.own_state import own_state
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler

EPS = 1e-3  # see test_torch_behaviour.py
SCALE = 2.0**10


def make_scaler(kind: type[torch.amp.GradScaler] = GradScaler, **options: Any) -> Any:
    return kind("cpu", init_scale=SCALE, growth_interval=2, **options)


def snapshot(optimizer: FusedShardedAdam) -> list[Tensor]:
    state = [tensor.clone() for each in own_state(optimizer).values() for tensor in each.values()]
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return state + params


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def beside_torch(rank: int, world_size: int, stage: int, explicit: bool) -> None:
    """fp32 parameters: torch's scaler, clip and AdamW on the ranks' mean gradient are the twin."""
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), lr=1e-2, eps=EPS, stage=stage, bucket_cap_mb=0.03)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=EPS, foreach=False)
    scalers = make_scaler(), make_scaler(torch.amp.GradScaler)
    for step in range(6):
        overflow = math.inf if step == 1 and rank == world_size - 1 else math.nan if step == 4 and rank == 0 else 1.0
        for each, scaler in zip((model, twin), scalers, strict=True):
            loss = each(batch(rank, step), branch=rank == 1).square().mean()
            scaler.scale(loss * overflow).backward()
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        before = snapshot(ours)
        if explicit:
            scalers[0].unscale_(ours)
            scalers[1].unscale_(theirs)
            norm = ours.clip_grad_norm_(0.1)
            expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            if step not in (1, 4):
                torch.testing.assert_close(norm, expected)
        for optimizer, scaler in zip((ours, theirs), scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert same(before, snapshot(ours)) == (step in (1, 4)), "a skipped step leaves everything as it was"
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_are_torch_s_and_an_overflow_on_one_rank_skips_all(world_size: int, stage: int, explicit: bool) -> None:
    run_ranks(beside_torch, world_size, stage, explicit)


def half(rank: int, world_size: int, stage: int, explicit: bool) -> list[Tensor]:
    """float16 parameters, whose gradients would underflow if they were not scaled."""
    model = make_model(torch.float16)
    ours = FusedShardedAdam(model.parameters(), lr=1e-2, eps=1e-6, stage=stage)
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=1000)
    for step in range(4):
        loss = 1e-6 * model(batch(rank, step, dtype=torch.float16)).float().square().mean()
        scaler.scale(loss * math.inf if step == 2 and rank == 0 else loss).backward()
        before = snapshot(ours)
        if explicit:
            scaler.unscale_(ours)
            norm = ours.clip_grad_norm_(1e-7)
            assert step == 2 or 1e-8 < norm < 1e-4, "of unscaled gradients"
        scaler.step(ours)
        scaler.update()
        assert same(before, snapshot(ours)) == (step == 2)
        ours.zero_grad()
    assert scaler.get_scale() == 2.0**13
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_float16_parameters_train_alike_in_every_stage(world_size: int, explicit: bool) -> None:
    one, *others = (run_ranks(half, world_size, stage, explicit) for stage in (1, 2, 3))
    for params in (*one, *(params for other in others for params in other)):
        assert same(params, one[0])
    untrained = [p.detach() for p in make_model(torch.float16).parameters()]
    assert not same(one[0], untrained)


def overflowing_sum(rank: int, world_size: int, stage: int) -> None:
    param = nn.Parameter(torch.zeros(5000))
    optimizer = FusedShardedAdam([param], lr=0.5, stage=stage)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale((param * 1e30).sum()).backward()
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, torch.tensor(1e30 * 5000**0.5))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    torch.testing.assert_close(param.detach(), torch.full((5000,), -0.5))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sum_of_squares_that_overflows_is_no_overflow(world_size: int, stage: int) -> None:
    run_ranks(overflowing_sum, world_size, stage)


def test_stage_1_shows_unscaled_gradients() -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), stage=1)
    scaler = make_scaler()
    scaler.scale(model(batch(0, 0)).square().mean()).backward()
    scaled = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    scaler.unscale_(optimizer)
    for p, was in zip((p for p in model.parameters() if p.grad is not None), scaled, strict=True):
        assert torch.equal(p.grad * SCALE, was)


def test_wrong_order_of_calls_raises_as_torch_does() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedShardedAdam([param])
    scaler = make_scaler()
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)


def test_disabled_and_for_another_optimizer_it_is_torch_s() -> None:
    for enabled in (True, False):
        params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        optimizers = [
            FusedShardedAdam([params[0]], lr=0.1),
            torch.optim.AdamW([params[1]], lr=0.1),
            torch.optim.AdamW([params[2]], lr=0.1),
        ]
        ours, theirs = make_scaler(enabled=enabled), make_scaler(torch.amp.GradScaler, enabled=enabled)
        for scaler, first, last in ((ours, 0, 2), (theirs, 2, 3)):
            scaler.scale(sum((p * p).sum() for p in params[first:last])).backward()
            for optimizer in optimizers[first:last]:
                scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(params[0], params[2])
        assert torch.equal(params[1], params[2])


def test_a_step_without_gradients_does_nothing() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedShardedAdam([param])
    scaler = make_scaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(4))


def test_torch_s_scaler_on_sharded_gradients_does_as_ours() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for param, make in zip(params, (torch.amp.GradScaler, GradScaler), strict=True):
        optimizer = FusedShardedAdam([param])
        scaler = make_scaler(make)
        for factor in (1.0, math.inf, 0.5):
            scaler.scale((param * param).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert torch.equal(*params)
    assert not torch.equal(params[0], torch.ones(4))


def discards(rank: int, world_size: int, stage: int, set_to_none: str) -> list[Tensor]:
    """A norm that is too large: the user throws the gradients away and goes on. Their scale must go with them."""
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage)
    scaler = make_scaler()
    if set_to_none:
        scaler.scale(model(batch(rank, 7)).square().mean()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1e-3)
        {"model": model, "optimizer": optimizer}[set_to_none].zero_grad()
        scaler.update()
    backward(model, batch(rank, 0))
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["model", "optimizer"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_scale_goes_with_the_gradients_it_was_for(world_size: int, stage: int, how: str) -> None:
    wanted, found = (run_ranks(discards, world_size, stage, each) for each in ("", how))
    assert same(wanted[0], found[0])


def test_gradients_added_to_scaled_ones_are_refused() -> None:
    for stage in (1, 2):
        model = make_model()
        optimizer = FusedShardedAdam(model.parameters(), stage=stage)
        backward(model, batch(0, 0))
        optimizer.clip_grad_norm_(0.5)
        backward(model, batch(0, 1))
        with pytest.raises(RuntimeError, match="gradients were added"):
            optimizer.step()
        optimizer.zero_grad()
        backward(model, batch(0, 0))
        optimizer.step()
