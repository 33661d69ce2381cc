"""mean_over(): the mean over all that was counted; gradient_divisor: over another number; scale_grads_()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.mean.tokens import EPS, assert_near, count_of, make_model, set_grads, summed_loss, tokens, true_sums
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam, FusedShardedSGD, GradScaler, ShardedOptimizer

MICROS = 2
STEPS = 20
STAGES = (1, 2, 3)


def train_on_tokens(rank: int, world_size: int, stage: int, syncs: bool) -> None:
    """Clipped steps; the first micro-batch of a step is sent with the second one, or by itself."""
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage, bucket_cap_mb=0.01)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    for step in range(STEPS):
        for micro in range(MICROS):
            loss = summed_loss(model, tokens(rank, step, micro))
            if micro + 1 < MICROS and not syncs:
                with ours.no_sync():
                    loss.backward()
            else:
                loss.backward()
        everything = [(r, step, micro) for r in range(world_size) for micro in range(MICROS)]
        total = sum(count_of(*each) for each in everything)
        own = sum(count_of(rank, step, micro) for micro in range(MICROS))
        sums = true_sums(twin, [tokens(*each) for each in everything])
        set_grads(twin, [each / total for each in sums])
        ours.mean_over(torch.tensor(own) if step % 2 else own)
        if stage == 1:
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
        norm = ours.clip_grad_norm_(0.3)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with ours.whole():
            assert_near(model, twin)


@pytest.mark.parametrize(("syncs", "world_size"), thinned([False, True], [False], [1, 2, 4], [4]))
@pytest.mark.parametrize("stage", STAGES)
def test_clipped_steps_are_adamw_s_on_the_mean_over_all_tokens(world_size: int, stage: int, syncs: bool) -> None:
    run_ranks(train_on_tokens, world_size, stage, syncs)


def step_of_nothing(rank: int, world_size: int, stage: int) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    ours = FusedShardedSGD(model.parameters(), lr=1.0, stage=stage)
    summed_loss(model, tokens(rank, 0, 0, 3)).backward()  # as if all of them were padding
    ours.mean_over(0)
    assert float(ours.clip_grad_norm_(1.0)) == 0.0
    ours.step()
    with ours.whole():
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_total_of_0_leaves_the_gradient_0(world_size: int, stage: int) -> None:
    run_ranks(step_of_nothing, world_size, stage)


def call_wrongly(rank: int, world_size: int, stage: int, wrong: str) -> str:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    ours = FusedShardedAdam(model.parameters(), stage=stage)
    summed_loss(model, tokens(rank, 0, 0, 5)).backward()
    try:
        if wrong == "twice":
            ours.mean_over(5)
            ours.mean_over(5)
        elif wrong == "twice on one rank":
            ours.mean_over(5)
            if rank == 1:
                ours.mean_over(5)
        elif wrong == "after a clip":
            ours.clip_grad_norm_(1.0)
            ours.mean_over(5)
        elif wrong == "on one rank":
            if rank == 1:
                ours.mean_over(5)
        elif wrong == "negative":
            ours.mean_over(-5 if rank == 1 else 5)
        elif wrong == "a list":
            ours.mean_over(torch.tensor([1, 2]) if rank == 1 else 5)
        elif wrong == "before the last backward":
            ours.mean_over(5)
            summed_loss(model, tokens(rank, 0, 1, 5)).backward()
        ours.step()
    except RuntimeError as error:
        said = str(error)
    with ours.whole():
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    ours.zero_grad()
    summed_loss(model, tokens(rank, 1, 0, 5)).backward()
    ours.mean_over(5)
    ours.step()
    return said


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("twice", "mean_over() was called twice"),
        ("twice on one rank", "mean_over()"),
        ("after a clip", "mean_over() was called after clip_grad_norm_()"),
        ("on one rank", "is in step() while rank 1 is in mean_over()"),
        ("negative", "the count -5"),
        ("a list", "one number"),
        ("before the last backward", "gradients were added"),
    ],
)
def test_a_wrong_call_raises_on_all_ranks_and_the_next_step_goes_on(stage: int, wrong: str, expected: str) -> None:
    assert all(expected in said for said in run_ranks(call_wrongly, 2, stage, wrong))


def divide(rank: int, world_size: int, stage: int, divisor: float, make: str, accumulates: bool) -> None:
    """Two groups of which one has a divisor of its own; sums are taken by a divisor of 1."""
    model, twin = make_model(), make_model()
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "gradient_divisor": 1.0}]
    options: dict[str, Any] = {"lr": 1e-3, "stage": stage, "gradient_divisor": divisor, "bucket_cap_mb": 0.01}
    ours = (
        FusedShardedSGD(groups, **options) if make == "fused" else ShardedOptimizer(groups, torch.optim.SGD, **options)
    )
    theirs = torch.optim.SGD(twin.parameters(), lr=1e-3)
    for step in range(3):
        everything = [(r, step, micro, 5) for r in range(world_size) for micro in range(2 if accumulates else 1)]
        for each in everything:
            if each[0] == rank:
                summed_loss(model, tokens(*each)).backward()
        sums = true_sums(twin, [tokens(*each) for each in everything])
        set_grads(twin, [each / (divisor if index < 3 else 1.0) for index, each in enumerate(sums)])
        if stage == 1:
            for p, q in zip(params, twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)
        if step == 1:
            norm = ours.clip_grad_norm_(10.0)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 10.0), rtol=1e-6, atol=0)
        if step == 2:
            ours.mean_over(2.0)
            set_grads(twin, [each / (2.0 * world_size) for each in sums])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with ours.whole():
            assert_near(model, twin, 5e-6)


MAKES = [("fused", False), ("fused", True), ("inner", False), ("inner", True)]


@pytest.mark.parametrize(("how", "world_size"), thinned(MAKES, [("fused", True)], [1, 2, 3], [3]), ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_sums_are_divided_by_the_group_s_divisor(world_size: int, stage: int, how: tuple[str, bool]) -> None:
    make, accumulates = how
    run_ranks(divide, world_size, stage, 6.0, make, accumulates)


def accumulate_some(rank: int, world_size: int, divisor: float) -> None:
    """Three backwards, of which the second reaches one parameter only."""
    params = [nn.Parameter(torch.zeros(6)) for _ in range(2)]
    ours = FusedShardedSGD(params, lr=1.0, stage=1, gradient_divisor=divisor)
    expected = [torch.zeros(6), torch.zeros(6)]
    generator = torch.Generator().manual_seed(0)
    for reached in [(0, 1), (0,), (0, 1)]:
        factors = torch.randn(world_size, 2, 6, generator=generator)
        for index in reached:
            expected[index] += factors[:, index].sum(0) / divisor
        torch.stack([(params[index] * factors[rank, index]).sum() for index in reached]).sum().backward()
        for param, grad in zip(params, expected, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=1e-6, atol=1e-6)
    ours.step()
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), -grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("divisor", [1.0, 6.0])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_stage_1_a_mean_that_stands_is_counted_once(world_size: int, divisor: float) -> None:
    run_ranks(accumulate_some, world_size, divisor)


def scale_by_hand(rank: int, world_size: int, stage: int) -> None:
    """Gradients that no backward made are sent once, whatever is done to their mean."""
    param = nn.Parameter(torch.zeros(6))
    ours = FusedShardedSGD([param], lr=1.0, stage=stage, gradient_divisor=1.0)
    param.grad = torch.arange(6.0) * (rank + 1)
    ours.scale_grads_(0.5)
    ours.clip_grad_norm_(1e9)
    ours.step()
    with ours.whole():
        assert torch.equal(param, -torch.arange(6.0) * sum(range(1, world_size + 1)) / 2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_that_were_written_by_hand_are_scaled_too(world_size: int, stage: int) -> None:
    run_ranks(scale_by_hand, world_size, stage)


def sum_exactly(rank: int, world_size: int, stage: int) -> None:
    """Three ranks' sum, which a mean times three would not have."""
    param = nn.Parameter(torch.zeros(5))
    ours = FusedShardedSGD([param], lr=1.0, stage=stage, gradient_divisor=1)
    (param * torch.tensor([0.1, 0.2, 0.3, 1e-8, 7.0])).sum().mul(rank + 1).backward()
    ours.step()
    g = torch.tensor([0.1, 0.2, 0.3, 1e-8, 7.0])
    with ours.whole():
        assert torch.equal(param, -((g + g * 2) + g * 3))


@pytest.mark.parametrize("stage", STAGES)
def test_a_divisor_of_1_gives_the_sum_to_the_bit(stage: int) -> None:
    run_ranks(sum_exactly, 3, stage)


@pytest.mark.parametrize("divisor", [0, -1.0, float("nan"), float("inf"), 1e-40, "2"])
@pytest.mark.parametrize("in_group", [False, True])
def test_other_divisors_are_refused(divisor: Any, in_group: bool) -> None:
    given = {"params": [nn.Parameter(torch.ones(2))]}
    options = {"gradient_divisor": divisor}
    with pytest.raises(ValueError, match="gradient_divisor must be a number"):
        FusedShardedAdam([given | (options if in_group else {})], **({} if in_group else options))


def test_a_divisor_that_is_changed_later_raises() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedShardedAdam([{"params": [param], "gradient_divisor": 2.0}])
    optimizer.param_groups[0]["gradient_divisor"] = 4.0
    param.sum().backward()
    with pytest.raises(RuntimeError, match="scale_grads_"):
        optimizer.step()


def scale(rank: int, world_size: int, stage: int) -> str:
    model, twin = make_model(), make_model()
    ours = FusedShardedSGD(model.parameters(), lr=0.1, stage=stage)
    summed_loss(model, tokens(rank, 0, 0, 3)).backward()
    ours.scale_grads_(0.25)
    ours.scale_grads_(torch.tensor(0.5))
    sums = true_sums(twin, [tokens(r, 0, 0, 3) for r in range(world_size)])
    set_grads(twin, [each / 8 / world_size for each in sums])
    norm = ours.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 1e9), rtol=1e-6, atol=0)
    ours.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    with ours.whole():
        assert_near(model, twin, 1e-6)
    ours.zero_grad()
    summed_loss(model, tokens(rank, 1, 0, 3)).backward()
    with pytest.raises(RuntimeError) as raised:
        ours.scale_grads_(1.0 + rank)
    ours.scale_grads_(2.0)
    ours.step()
    return str(raised.value)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_scaled_by_what_all_ranks_say(stage: int) -> None:
    for said in run_ranks(scale, 2, stage):
        assert "different arguments to scale_grads_(): 1 and 2" in said


def with_a_scaler(rank: int, world_size: int, stage: int) -> None:
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        own = 3 + rank
        scaler.scale(summed_loss(model, tokens(rank, step, 0, own))).backward()
        scaler.unscale_(ours)
        ours.mean_over(own)
        norm = ours.clip_grad_norm_(0.3)
        scaler.step(ours)
        scaler.update()
        counts = [3 + r for r in range(world_size)]
        sums = true_sums(twin, [tokens(r, step, 0, count) for r, count in enumerate(counts)])
        set_grads(twin, [each / sum(counts) for each in sums])
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.3), rtol=1e-6, atol=0)
        theirs.step()
        ours.zero_grad()
        with ours.whole():
            assert_near(model, twin)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_with_a_scaler_the_mean_is_of_unscaled_gradients(world_size: int, stage: int) -> None:
    run_ranks(with_a_scaler, world_size, stage)
