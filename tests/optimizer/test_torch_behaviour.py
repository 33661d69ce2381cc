"""What users of torch.optim expect of an optimizer, in one process and over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.models import backward, batch, make_model, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

# Large enough that a gradient which is nothing but rounding noise doesn't become a full step: these tests follow torch
# over several steps, and such noise differs between any two sums.
EPS = 1e-3


def pair(**options: Any) -> tuple[nn.Module, FusedShardedAdam, nn.Module, torch.optim.AdamW]:
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), lr=1e-2, eps=EPS, **options)
    return model, ours, twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=EPS, foreach=False)


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", rtol=1e-5, atol=1e-6)


def closures(rank: int, world_size: int, stage: int) -> None:
    """As Lightning does it: forward, backward and clip run inside step(), which is without gradients but for them."""
    model, ours, twin, theirs = pair(stage=stage)
    for step in range(3):

        def run(each: nn.Module, optimizer: Any, clip: Any, step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = each(batch(rank, step)).square().mean()
            loss.backward()
            clip()
            return loss

        def clip_the_mean() -> None:
            for param in twin.parameters():
                param.grad = mean_over_ranks(param.grad, param, world_size)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)

        ours_loss = ours.step(lambda: run(model, ours, lambda: ours.clip_grad_norm_(0.1)))
        their_loss = theirs.step(lambda: run(twin, theirs, clip_the_mean))
        torch.testing.assert_close(ours_loss, their_loss)
        assert ours_loss.requires_grad
        assert_close(model, twin)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_a_closure_runs_forward_backward_and_clip_inside_step(world_size: int, stage: int) -> None:
    run_ranks(closures, world_size, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_have_their_own_options_and_can_be_added(stage: int) -> None:
    model, twin = make_model(), make_model()

    def groups(each: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(each.inner.parameters()), "lr": 5e-2},
            {"params": [each.gain], "weight_decay": 0.0, "maximize": True},
        ]

    ours = FusedShardedAdam(groups(model), lr=1e-2, eps=EPS, stage=stage)
    theirs = torch.optim.AdamW(groups(twin), lr=1e-2, eps=EPS, foreach=False)
    for step in range(4):
        for each, optimizer in ((model, ours), (twin, theirs)):
            if step == 2:
                optimizer.add_param_group(
                    {"params": list(each.outer.parameters()), "betas": (0.5, 0.9), "amsgrad": True}
                )
            backward(each, batch(0, step))
            optimizer.step()
            each.zero_grad()
    assert_close(model, twin)


@pytest.mark.parametrize("stage", [1, 2])
def test_absent_frozen_and_unfrozen_parameters_are_treated_as_torch_does(stage: int) -> None:
    model, ours, twin, theirs = pair(stage=stage)
    for step in range(6):
        for each, optimizer in ((model, ours), (twin, theirs)):
            each.inner.requires_grad_(step not in (2, 3))
            if step != 1:  # a step without any gradient changes nothing
                backward(each, batch(0, step), branch=step == 4)
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, twin)
    steps = [int(ours.state[p]["step"]) for p in model.branch.parameters()]
    assert steps == [1, 1]
    assert all(
        torch.equal(p, q) for p, q in zip(model.unused.parameters(), make_model().unused.parameters(), strict=True)
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_grad_reaches_frozen_parameters_too(stage: int) -> None:
    """One that was never trained, and one that is frozen with its gradient in place."""
    model, ours, _, _ = pair(stage=stage)
    model.requires_grad_(False)
    never = nn.Parameter(torch.ones(3), requires_grad=False)
    ours.add_param_group({"params": [never]})
    for set_to_none in (False, True):
        for param in (never, model.gain):
            param.grad = torch.ones_like(param)
        ours.zero_grad(set_to_none)
        assert all((p.grad is None) if set_to_none else not p.grad.any() for p in (never, model.gain))


@pytest.mark.parametrize("stage", [1, 2])
def test_amsgrad_may_be_turned_on_later(stage: int) -> None:
    """Before the first step as in torch. Later torch has a KeyError; here the maximum starts then."""
    model, ours, twin, theirs = pair(stage=stage)
    for step in range(4):
        for each, optimizer in ((model, ours), (twin, theirs)):
            optimizer.param_groups[0]["amsgrad"] = True
            backward(each, batch(0, step) * (100.0 if step == 0 else 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, twin)
    later = FusedShardedAdam([nn.Parameter(torch.ones(300))], stage=stage)
    (param,) = later.param_groups[0]["params"]
    for step in range(2):
        later.param_groups[0]["amsgrad"] = step == 1
        param.grad = torch.full((300,), 2.0)
        later.step()
    state = later.state[param]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])


def unfreeze_later(rank: int, world_size: int, stage: int) -> list[torch.Tensor]:
    model, twin = make_model(), make_model()
    for each in (model, twin):
        each.outer.requires_grad_(False)
    ours = FusedShardedAdam(model.named_parameters(), lr=1e-2, eps=EPS, stage=stage)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=EPS, foreach=False)
    frozen_state = [p in ours.state for p in model.outer.parameters()]
    assert frozen_state == [False, False]
    for step in range(4):
        for each in (model, twin):
            if step == 2:
                each.outer.requires_grad_(True)
            backward(each, batch(rank, step))
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, twin)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_unfrozen_later_is_taken_in_at_the_next_step(world_size: int, stage: int) -> None:
    results = run_ranks(unfreeze_later, world_size, stage)
    for result in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(result, results[0], strict=True))


def test_channels_last_transposed_and_expanded_parameters_train() -> None:
    def build() -> nn.ParameterList:
        torch.manual_seed(3)
        conv = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
        return nn.ParameterList(
            [nn.Parameter(conv), nn.Parameter(torch.randn(6, 5).t()), nn.Parameter(torch.randn(9, 4)[:, ::2])]
        )

    model, twin = build(), build()
    ours = FusedShardedAdam(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=False)
    assert model[0].is_contiguous(memory_format=torch.channels_last)
    image = torch.randn(2, 4, 8, 8)
    for _ in range(3):
        for each, optimizer in ((model, ours), (twin, theirs)):
            loss = nn.functional.conv2d(image, each[0]).square().mean()
            loss = loss + (each[1] * torch.arange(30.0).view(5, 6)).sum().square() + each[2].pow(3).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model, twin, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_moved_parameter_is_taken_back_in_with_its_values(stage: int) -> None:
    model, ours, twin, theirs = pair(stage=stage)
    for step in range(3):
        for each, optimizer in ((model, ours), (twin, theirs)):
            if step == 1:
                each.outer.weight.data = torch.full_like(each.outer.weight, 0.25)
            backward(each, batch(0, step))
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, twin)
    model.outer.weight.data = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"param 5.*\(3, 3\)"):
        ours.step()


def test_a_value_written_into_a_16_bit_parameter_replaces_its_fp32_master() -> None:
    param = nn.Parameter(torch.full((40,), 1.0, dtype=torch.float16))
    ours = FusedShardedAdam([param], lr=1e-4, weight_decay=0.0)
    for _ in range(3):  # the master moves below what fp16 shows
        param.grad = torch.ones_like(param)
        ours.step()
        ours.zero_grad()
    master = ours.state[param]["master"].clone()
    param.data[:20] = 2.0
    param.grad = torch.zeros_like(param)
    ours.param_groups[0]["lr"] = 0.0
    ours.step()
    assert torch.equal(ours.state[param]["master"][:20], torch.full((20,), 2.0))
    assert torch.equal(ours.state[param]["master"][20:], master[20:])
