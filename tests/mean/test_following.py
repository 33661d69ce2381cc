"""What a rank that has run out of batches does in the others' calls, and what it can't follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.mean.tokens import EPS, assert_near, cap_mb, count_of, make_model, set_grads, summed_loss, tokens, true_sums
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD, GradScaler, ShardedOptimizer

STAGES = (1, 2, 3)
ROWS = 4
BATCHES = (4, 2)  # of ranks 0 and 1


def some_of(model: nn.Module) -> list[nn.Parameter]:
    params = list(model.parameters())
    return [params[0], params[3]]


OURS: dict[str, Callable[[FusedShardedAdam, nn.Module], Any]] = {
    "clip_grad_norm_": lambda ours, _: ours.clip_grad_norm_(0.1, 1.0),
    "clip some": lambda ours, model: ours.clip_grad_norm_(0.05, parameters=some_of(model)),
    "clip_grad_value_": lambda ours, _: ours.clip_grad_value_(0.01),
    "scale_grads_": lambda ours, _: ours.scale_grads_(0.3),
    "zerox.clip_grad_norm_": lambda ours, _: zerox.clip_grad_norm_([ours], 0.1),
    "zerox.clip_grad_norm_, no clip": lambda ours, _: zerox.clip_grad_norm_([ours], float("inf")),
    "synchronize": lambda ours, _: ours.synchronize(),
}
THEIRS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda twin: nn.utils.clip_grad_norm_(twin.parameters(), 0.1, 1.0),
    "clip some": lambda twin: nn.utils.clip_grad_norm_(some_of(twin), 0.05),
    "clip_grad_value_": lambda twin: nn.utils.clip_grad_value_(twin.parameters(), 0.01),
    "scale_grads_": lambda twin: torch._foreach_mul_([p.grad for p in twin.parameters()], 0.3),
    "zerox.clip_grad_norm_": lambda twin: nn.utils.clip_grad_norm_(twin.parameters(), 0.1),
    "zerox.clip_grad_norm_, no clip": lambda _: None,
    "synchronize": lambda _: None,
}


def follow_a_call(rank: int, world_size: int, stage: int, call: str) -> None:
    model, twin = make_model(), make_model()
    cap = cap_mb(stage, several=call == "clip some")
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage, bucket_cap_mb=cap)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    for step in range(max(BATCHES)):
        sums = true_sums(twin, [tokens(r, step, 0, ROWS) for r in range(2) if step < BATCHES[r]])
        set_grads(twin, [each / 2 for each in sums])
        THEIRS[call](twin)
        theirs.step()
    with ours.join():
        for step in range(BATCHES[rank]):
            ours.zero_grad()
            summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
            OURS[call](ours, model)
            ours.step()
    with ours.whole():
        assert_near(model, twin)


@pytest.mark.parametrize("call", OURS)
@pytest.mark.parametrize("stage", STAGES)
def test_each_call_is_followed(stage: int, call: str) -> None:
    run_ranks(follow_a_call, 2, stage, call)


def weigh_tokens(rank: int, world_size: int, stage: int, divide: str, scales: bool) -> None:
    """Micro-batches of random weight; rank 1 runs out in the middle of a step."""
    model, twin = make_model(), make_model()
    micros = (7, 3)  # of ranks 0 and 1, two a step
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage, bucket_cap_mb=cap_mb(stage, scales))
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    for step in range(4):
        everything = [(r, step, m) for r in range(2) for m in range(2) if 2 * step + m < micros[r]]
        total = sum(count_of(*each) for each in everything)
        by = (2 if scales else 1) / total
        set_grads(twin, [each * by for each in true_sums(twin, [tokens(*each) for each in everything])])
        nn.utils.clip_grad_norm_(twin.parameters(), 100.0)  # a smaller one would hide a wrong mean
        theirs.step()
    with ours.join(divide):
        counted = 0
        for micro in range(micros[rank]):
            step, m = divmod(micro, 2)
            loss = summed_loss(model, tokens(rank, step, m))
            counted += count_of(rank, step, m)
            if m == 0 and micro + 1 < micros[rank]:
                with ours.no_sync():
                    loss.backward()
                continue
            loss.backward()
            if scales:
                ours.scale_grads_(2.0)  # here the mean over active ranks is made, which the next call replaces
            ours.mean_over(counted)
            ours.clip_grad_norm_(100.0)
            ours.step()
            ours.zero_grad()
            counted = 0
    with ours.whole():
        assert_near(model, twin)


@pytest.mark.parametrize(("divide", "scales"), [("all", False), ("active", False), ("active", True)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_tokens_counts_none_of_a_rank_that_follows(stage: int, divide: str, scales: bool) -> None:
    run_ranks(weigh_tokens, 2, stage, divide, scales)


def accumulate(rank: int, world_size: int, stage: int, syncs: bool, divide: str) -> None:
    """Several backwards a step. Rank 1 runs out after the first micro-batch of its second step, which counts."""
    model, twin = make_model(), make_model()
    micros = (8, 3)
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage, bucket_cap_mb=cap_mb(stage, syncs))
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    for step in range(4):
        own = [[tokens(r, step, m, ROWS) for m in range(2) if 2 * step + m < micros[r]] for r in range(2)]
        by = sum(1 for each in own if each) if divide == "active" else 2
        set_grads(twin, [each / by for each in true_sums(twin, [x for each in own for x in each])])
        theirs.step()
    with ours.join(divide):
        for micro in range(micros[rank]):
            loss = summed_loss(model, tokens(rank, micro // 2, micro % 2, ROWS))
            if micro % 2 == 0 and not syncs:
                with ours.no_sync():
                    loss.backward()
            else:
                loss.backward()
            if micro % 2 == 1:
                ours.step()
                ours.zero_grad()
    with ours.whole():
        assert_near(model, twin)


@pytest.mark.parametrize("divide", ["all", "active"])
@pytest.mark.parametrize("syncs", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_may_run_out_in_the_middle_of_a_step(stage: int, syncs: bool, divide: str) -> None:
    run_ranks(accumulate, 2, stage, syncs, divide)


def schedule(rank: int, world_size: int, stage: int) -> None:
    """The learning rate changes while rank 1 follows, which updates a half of the parameters."""
    model, twin = make_model(), make_model()
    ours = FusedShardedSGD(model.parameters(), lr=0.1, momentum=0.9, stage=stage)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (ours, theirs)]
    for step in range(4):
        sums = true_sums(twin, [tokens(r, step, 0, ROWS) for r in range(2) if step < BATCHES[r]])
        set_grads(twin, [each / 2 for each in sums])
        theirs.step()
        schedulers[1].step()
    with ours.join():
        for step in range(BATCHES[rank]):
            summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
            ours.step()
            schedulers[0].step()
            ours.zero_grad()
    assert ours.param_groups[0]["lr"] == (0.1 / 16 if rank == 0 else 0.1 / 8), "as it was at the others' last step"
    with ours.whole():
        assert_near(model, twin, 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_follows_takes_the_others_options(stage: int) -> None:
    run_ranks(schedule, 2, stage)


def overflow(rank: int, world_size: int, stage: int) -> None:
    """The others' gradients are inf in a step that rank 1 follows: all ranks skip it, and the next one is made."""
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    scaler = GradScaler("cpu", init_scale=64.0)
    for step in (0, 1, 3):
        sums = true_sums(twin, [tokens(r, step, 0, ROWS) for r in range(2) if step < BATCHES[r]])
        set_grads(twin, [each / 2 for each in sums])
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        theirs.step()
    with ours.join():
        for step in range(BATCHES[rank]):
            loss = summed_loss(model, tokens(rank, step, 0, ROWS))
            scaler.scale(loss * float("inf") if step == 2 else loss).backward()
            scaler.unscale_(ours)
            ours.clip_grad_norm_(0.1)
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
    assert scaler.get_scale() == (32.0 if rank == 0 else 64.0)
    with ours.whole():
        assert_near(model, twin)
    assert all(int(state["step"]) == 3 for state in ours.state.values() if state)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_a_scaler_skips_is_skipped_by_all(stage: int) -> None:
    run_ranks(overflow, 2, stage)


def inner_class(rank: int, world_size: int, stage: int) -> None:
    model, twin = make_model(), make_model()
    ours = ShardedOptimizer(model.parameters(), torch.optim.RMSprop, lr=1e-3, eps=EPS, stage=stage)
    theirs = torch.optim.RMSprop(twin.parameters(), lr=1e-3, eps=EPS, foreach=False)
    for step in range(4):
        sums = true_sums(twin, [tokens(r, step, 0, ROWS) for r in range(2) if step < BATCHES[r]])
        set_grads(twin, [each / 2 for each in sums])
        theirs.step()
    with ours.join():
        for step in range(BATCHES[rank]):
            summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
            ours.step()
            ours.zero_grad()
    with ours.whole():
        assert_near(model, twin)


@pytest.mark.parametrize("stage", STAGES)
def test_any_class_is_followed(stage: int) -> None:
    run_ranks(inner_class, 2, stage)
