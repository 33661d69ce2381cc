"""Norms and limits of what is asked for: some parameters, each element, several optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerox
from tests.mean.tokens import EPS, assert_near, make_model, set_grads, summed_loss, tokens, true_sums
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD, ShardedOptimizer

STAGES = (1, 2, 3)


def mean_into(twin: nn.Module, world_size: int, step: int) -> None:
    sums = true_sums(twin, [tokens(r, step, 0, 4) for r in range(world_size)])
    set_grads(twin, [each / world_size for each in sums])


def clip_some(rank: int, world_size: int, stage: int, p: float) -> list[float]:
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage, bucket_cap_mb=0.01)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    norms = []
    for step in range(3):
        summed_loss(model, tokens(rank, step, 0, 4)).backward()
        mean_into(twin, world_size, step)
        for chosen in ([0], [2, 3, 5], [1]):
            some, same = ([list(m.parameters())[index] for index in chosen] for m in (model, twin))
            norm = ours.clip_grad_norm_(0.5, p, parameters=some if len(some) > 1 else some[0])
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(same, 0.5, p), rtol=2e-6, atol=0)
            norms.append(float(norm))
            if stage == 1:
                for one, other in zip(some, same, strict=True):
                    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        norm = ours.clip_grad_norm_(1.0, p)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 1.0, p), rtol=2e-6, atol=0)
        norms.append(float(norm))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with ours.whole():
            assert_near(model, twin)
    return norms


@pytest.mark.parametrize(("p", "world_size"), thinned([2.0, 1.0, math.inf], [2.0], [1, 3], [3]))
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_and_the_scale_are_of_the_parameters_asked_for(world_size: int, stage: int, p: float) -> None:
    norms = run_ranks(clip_some, world_size, stage, p)
    assert all(each == norms[0] for each in norms), "all ranks see the same norms, to the bit"


ASKS: dict[str, Callable[[FusedShardedAdam, int], Any]] = {
    "other parameters": lambda ours, rank: ours.clip_grad_norm_(1.0, parameters=[ours.param_groups[0]["params"][rank]]),
    "another limit": lambda ours, rank: ours.clip_grad_norm_(1.0 + rank),
    "another order": lambda ours, rank: ours.clip_grad_norm_(1.0, 1.0 + rank),
    "a stranger": lambda ours, _: ours.clip_grad_norm_(1.0, parameters=[torch.ones(3)]),
}


def ask_differently(rank: int, world_size: int, what: str) -> str:
    model = make_model()
    ours = FusedShardedAdam(model.parameters())
    summed_loss(model, tokens(rank, 0, 0, 4)).backward()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        ASKS[what](ours, rank)
    ours.clip_grad_norm_(1.0)
    ours.step()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("other parameters", "different arguments to clip_grad_norm_()"),
        ("another limit", "different arguments to clip_grad_norm_(): 1 and 2"),
        ("another order", "different arguments to clip_grad_norm_(): 1 and 2"),
        ("a stranger", "none that this optimizer trains"),
    ],
)
def test_ranks_that_ask_for_something_else_are_told(what: str, expected: str) -> None:
    assert all(expected in said for said in run_ranks(ask_differently, 2, what))


def clip_values(rank: int, world_size: int, stage: int, rule: str, dtype: torch.dtype) -> None:
    model, twin = make_model().to(dtype), make_model().to(dtype)
    options: dict[str, Any] = {"stage": stage, "bucket_cap_mb": 0.01, "lr": 1e-3}
    if rule == "adam":
        ours: Any = FusedShardedAdam(model.parameters(), eps=EPS, **options)
        theirs: Any = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    elif rule == "lion":
        ours, theirs = FusedShardedLion(model.parameters(), **options), None
    elif rule == "sgd":
        ours = FusedShardedSGD(model.parameters(), momentum=0.9, **options)
        theirs = torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    else:
        ours = ShardedOptimizer(model.parameters(), torch.optim.RMSprop, eps=EPS, **options)
        theirs = torch.optim.RMSprop(twin.parameters(), lr=1e-3, eps=EPS, foreach=False)
    if theirs is None:  # Lion's other implementation here: its own unlimited step on gradients cut by hand
        theirs = FusedShardedLion(twin.parameters(), process_group="alone", stage=1, lr=1e-3)
    for step in range(3):
        summed_loss(model, tokens(rank, step, 0, 4).to(dtype)).backward()
        mean_into(twin, world_size, step)
        ours.clip_grad_norm_(2.0)
        ours.clip_grad_value_(0.05)
        nn.utils.clip_grad_norm_(twin.parameters(), 2.0)
        nn.utils.clip_grad_value_(twin.parameters(), 0.05)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with ours.whole():
            assert_near(model, twin, 1e-7 if rule != "lion" else 1e-6)


@pytest.mark.parametrize(("rule", "world_size"), thinned(["adam", "sgd", "lion", "inner"], ["adam"], [1, 2], [2]))
@pytest.mark.parametrize("stage", STAGES)
def test_elements_are_cut_after_the_norm_s_scale(world_size: int, stage: int, rule: str) -> None:
    run_ranks(clip_values, world_size, stage, rule, torch.float32)


AFTER_A_CUT: dict[str, Callable[[FusedShardedAdam, int], Any]] = {
    "clip_grad_norm_": lambda ours, _: ours.clip_grad_norm_(1.0),
    "mean_over": lambda ours, _: ours.mean_over(4),
    "scale_grads_": lambda ours, _: ours.scale_grads_(2.0),
    "clip_grad_value_": lambda ours, rank: ours.clip_grad_value_(0.2 + rank),
}


def cut_wrongly(rank: int, world_size: int, call: str) -> str:
    model = make_model()
    ours = FusedShardedAdam(model.parameters())
    summed_loss(model, tokens(rank, 0, 0, 4)).backward()
    ours.clip_grad_value_(0.1)
    with pytest.raises(RuntimeError) as raised:
        AFTER_A_CUT[call](ours, rank)
    ours.zero_grad()
    summed_loss(model, tokens(rank, 1, 0, 4)).backward()
    ours.clip_grad_norm_(1.0)
    ours.step()
    return str(raised.value)


@pytest.mark.parametrize("call", AFTER_A_CUT)
def test_nothing_may_follow_the_cut_but_the_step(call: str) -> None:
    assert all(f"{call}() was called after clip_grad_value_()" in said for said in run_ranks(cut_wrongly, 2, call))


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        FusedShardedAdam([nn.Parameter(torch.ones(2))]).clip_grad_value_(-1.0)


def clip_together(rank: int, world_size: int, stages: tuple[int, int], p: float, scaled: bool) -> float:
    model, twin = make_model(), make_model()
    params, same = list(model.parameters()), list(twin.parameters())
    ours = [
        FusedShardedAdam(params[:3], eps=EPS, stage=stages[0]),
        FusedShardedSGD(params[3:], lr=1e-3, stage=stages[1]),
    ]
    theirs = [
        torch.optim.AdamW(same[:3], eps=EPS, foreach=False),
        torch.optim.SGD(same[3:], lr=1e-3, foreach=False),
    ]
    norm = torch.zeros(())
    for step in range(3):
        summed_loss(model, tokens(rank, step, 0, 4)).backward()
        mean_into(twin, world_size, step)
        if scaled:
            ours[1].scale_grads_(0.5)
            for each in same[3:]:
                each.grad.mul_(0.5)  # type: ignore[union-attr]
        norm = zerox.clip_grad_norm_(ours, 0.5, p, error_if_nonfinite=True)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(same, 0.5, p), rtol=2e-6, atol=0)
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        with ours[0].whole(), ours[1].whole():
            assert_near(model, twin)
    return float(norm)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("p", "world_size"), thinned([2.0, math.inf], [2.0], [1, 2], [2]))
@pytest.mark.parametrize("stages", [(1, 2), (2, 3)])
def test_several_optimizers_have_one_norm(world_size: int, stages: tuple[int, int], p: float, scaled: bool) -> None:
    assert len(set(run_ranks(clip_together, world_size, stages, p, scaled))) == 1


def over_a_group(rank: int, world_size: int) -> None:
    """Ranks 0, 1 and ranks 2, 3 share a half of a model each; the norm is over both halves."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    params = [nn.Parameter(torch.zeros(10)) for _ in range(2)]
    own = params[rank // 2]
    optimizer = FusedShardedSGD([own], lr=1.0, process_group=halves[rank // 2])
    (own * (3.0 if rank < 2 else 4.0)).sum().backward()
    norm = zerox.clip_grad_norm_(optimizer, 1.0, group=across[rank % 2])
    torch.testing.assert_close(norm, torch.tensor(5.0 * math.sqrt(10)))
    optimizer.step()
    torch.testing.assert_close(own.detach().norm(), torch.tensor(0.6 if rank < 2 else 0.8))


def test_the_norm_may_include_other_parts_of_the_model() -> None:
    run_ranks(over_a_group, 4)


def test_no_optimizer_and_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        zerox.clip_grad_norm_([], 1.0)
    with pytest.raises(ValueError, match="norm_type"):
        zerox.clip_grad_norm_(FusedShardedAdam([nn.Parameter(torch.ones(2))]), 1.0, 0.0)
