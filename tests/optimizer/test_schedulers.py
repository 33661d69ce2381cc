"""Every scheduler of torch drives this optimizer as it drives torch.optim.AdamW: the same options, the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.optimizer.models import backward, batch, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

EPS = 1e-3  # see test_torch_behaviour.py
NUM_STEPS = 7

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda epoch: 0.9**epoch, lambda epoch: 1.0 / (epoch + 1)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),  # ends at a rate of 0
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 2e-2, step_size_up=2),  # moves beta1 too
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=10, three_phase=True),  # moves beta1 too
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, anneal_epochs=4),
}


def test_no_scheduler_of_torch_is_missing() -> None:
    base = lr_scheduler.LRScheduler
    public = [getattr(lr_scheduler, name) for name in lr_scheduler.__all__] + [torch.optim.swa_utils.SWALR]
    assert {each.__name__ for each in public if each is not base and issubclass(each, base)} == SCHEDULERS.keys()


def groups_of(model: Any, tensor_lr: bool) -> list[dict[str, Any]]:
    def rate(lr: float) -> Any:
        return torch.tensor(lr) if tensor_lr else lr

    return [
        {"params": list(model[0].parameters()), "lr": rate(1e-2)},
        {"params": list(model[2].parameters()), "lr": rate(3e-2)},
    ]


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(72, 80), nn.Tanh(), nn.Linear(80, 4))


def follow(rank: int, world_size: int, stage: int, tensor_lr: bool) -> list[str]:
    """Trains twins under each scheduler. Returns those whose options never changed, which would prove nothing."""
    still = []
    for name, schedule in SCHEDULERS.items():
        model, twin = small_model(), small_model()
        ours = FusedShardedAdam(groups_of(model, tensor_lr), eps=EPS, stage=stage, bucket_cap_mb=0.03)
        theirs = torch.optim.AdamW(groups_of(twin, tensor_lr), eps=EPS, foreach=False)
        schedules = [schedule(ours), schedule(theirs)]
        seen = []
        for step in range(NUM_STEPS):
            for each in (model, twin):
                backward(each, batch(rank, step))
            for param in twin.parameters():
                param.grad = mean_over_ranks(param.grad, param, world_size)
            for optimizer, scheduler in zip((ours, theirs), schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            options = [[(float(g["lr"]), g["betas"]) for g in optimizer.param_groups] for optimizer in (ours, theirs)]
            assert options[0] == options[1], f"{name}, step {step}"
            seen.append(options[0])
            assert_close(model, twin, f"{name}, step {step}")
        if all(each == seen[0] for each in seen):
            still.append(name)
        assert all(isinstance(group["lr"], torch.Tensor) == tensor_lr for group in ours.param_groups), name
    return still


def assert_close(model: nn.Module, twin: nn.Module, where: str) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{where}, {name}: {m}", rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")  # SequentialLR's own first step
@pytest.mark.parametrize(
    ("world_size", "stage", "tensor_lr"), [(1, 1, False), (1, 2, True), (2, 1, True), (3, 2, False)]
)
def test_options_and_parameters_follow_adamw_under_every_scheduler(
    world_size: int, stage: int, tensor_lr: bool
) -> None:
    assert run_ranks(follow, world_size, stage, tensor_lr) == [[]] * world_size


def change_a_tensor_lr_in_place(rank: int, world_size: int, stage: int) -> None:
    model, twin = small_model(), small_model()
    lr, their_lr = torch.tensor(1e-2), torch.tensor(1e-2)
    ours = FusedShardedAdam(model.parameters(), lr=lr, eps=EPS, stage=stage)
    theirs = torch.optim.AdamW(twin.parameters(), lr=their_lr, eps=EPS, foreach=False)
    for step in range(4):
        for each in (model, twin):
            backward(each, batch(rank, step))
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        for rate, optimizer in ((lr, ours), (their_lr, theirs)):
            rate.mul_(0.0 if step == 2 else 0.5).add_(1e-3 if step == 3 else 0.0)
            optimizer.step()
            optimizer.zero_grad()
        assert ours.param_groups[0]["lr"] is lr
        assert_close(model, twin, f"step {step}")


@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_a_tensor_lr_may_change_in_place_between_steps(world_size: int, stage: int) -> None:
    run_ranks(change_a_tensor_lr_in_place, world_size, stage)


def rates_that_differ(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[float]]:
    """One step in which rank r uses the rate (r + 1) / 100. Returns the parameters, and the rate each element saw."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(3 * 8192))
    before = param.detach().clone()
    optimizer = FusedShardedAdam([param], lr=1.0, weight_decay=0.0, eps=0.0)
    optimizer.param_groups[0]["lr"] = (rank + 1) / 100
    param.grad = torch.ones_like(param)
    optimizer.step()  # a first step with eps 0 moves every element by its rate
    return [param.detach()], (before - param.detach()).round(decimals=4).unique().tolist()


def test_rates_that_differ_over_ranks_give_each_shard_its_owners_and_all_ranks_the_same_parameters() -> None:
    """The documentation's promise for a mistake that nothing checks: ranks stay equal, shard by shard."""
    results = run_ranks(rates_that_differ, 3)
    for (param,), rates in results:
        assert torch.equal(param, results[0][0][0])
        assert rates == pytest.approx([0.01, 0.02, 0.03], abs=1e-3)
