"""State that begins late, and state that does not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.kernels.shards import same_bits
from tests.local_optimizers.test_state import shared
from tests.ranks import run_ranks
from zerox import ShardedOptimizer

# ---- state that begins late


def late(rank: int, world_size: int, folder: str) -> None:
    """SGD's momentum is turned on in the middle: it begins with a gradient, and not with zero, which dampening shows.

    One parameter has no gradient in that step, and is saved and loaded without a momentum."""

    def build() -> tuple[list[nn.Parameter], ShardedOptimizer]:
        params = [nn.Parameter(torch.linspace(-1, 1, 5000)), nn.Parameter(torch.linspace(0, 1, 5000))]
        return params, ShardedOptimizer(params, torch.optim.SGD, lr=0.1, dampening=0.5)

    model = nn.ParameterList()
    params, ours = build()
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    theirs = torch.optim.SGD(twins, lr=0.1, dampening=0.5)

    def step(number: int, having: tuple[int, ...]) -> None:
        for index, (param, twin) in enumerate(zip(params, twins, strict=True)):
            grad = torch.full((5000,), 1.0 + number) if index in having else None
            param.grad, twin.grad = grad, None if grad is None else grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(params, twins, strict=True)), number

    step(0, having=(0, 1))
    for each in (ours, theirs):
        each.param_groups[0]["momentum"] = 0.9
    step(1, having=(0,))
    model.extend(params)
    zerox.save(folder, model, ours)
    full, share = shared(ours.full_state_dict()), ours.state_dict()
    assert "momentum_buffer" in full["state"][0]
    assert "momentum_buffer" not in full["state"][1]
    slices = share["state"][1].get("momentum_buffer")
    assert slices is None or (world_size > 1 and not slices.own.numel()), "there is none in what this rank has"
    weights = copy.deepcopy(model.state_dict())
    kept = [twin.detach().clone() for twin in twins], copy.deepcopy(theirs.state_dict())
    for way in ("load", "full", "share"):
        params, ours = build()
        model = nn.ParameterList(params)
        model.load_state_dict(weights)
        if way == "load":
            zerox.load(folder, model, ours)
        else:
            ours.load_state_dict(full if way == "full" else share)
        for twin, value in zip(twins, kept[0], strict=True):
            twin.data.copy_(value)
        theirs.load_state_dict(copy.deepcopy(kept[1]))
        for number in (2, 3):
            step(number, having=(0, 1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_momentum_that_is_turned_on_later_begins_with_a_gradient(world_size: int, tmp_path: Path) -> None:
    run_ranks(late, world_size, str(tmp_path / "x"))


def test_amsgrad_may_be_turned_on_later() -> None:
    """Before the first step as in torch. Later torch has a KeyError; here the maximum begins with zero then."""
    param, twin = (nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(2))
    ours, theirs = ShardedOptimizer([param], torch.optim.Adam), torch.optim.Adam([twin])
    for each, optimizer in ((param, ours), (twin, theirs)):
        optimizer.param_groups[0]["amsgrad"] = True
        for step in range(2):
            each.grad = torch.full((300,), 2.0 - step)
            optimizer.step()
    assert same_bits(param.detach(), twin.detach())
    assert same_bits(ours.state[param]["max_exp_avg_sq"], theirs.state[twin]["max_exp_avg_sq"])
    later = ShardedOptimizer([param], torch.optim.Adam)
    for step in range(2):
        later.param_groups[0]["amsgrad"] = step == 1
        param.grad = torch.full((300,), 2.0)
        later.step()
    assert same_bits(later.state[param]["max_exp_avg_sq"], later.state[param]["exp_avg_sq"])


def test_state_that_the_constructor_makes_is_there_from_the_start() -> None:
    """Adagrad's sums, in torch's state_dict() too before any step; and again once a start is loaded."""
    param, twin = (nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(2))
    ours = ShardedOptimizer([param], torch.optim.Adagrad, initial_accumulator_value=0.5)
    theirs = torch.optim.Adagrad([twin], initial_accumulator_value=0.5)
    start = copy.deepcopy(ours.state_dict())
    assert same_bits(start["state"][0]["sum"], theirs.state_dict()["state"][0]["sum"])
    param.grad = torch.ones(300)
    ours.step()
    for given in (start, {**start, "state": {}}):
        ours.load_state_dict(given)
        assert same_bits(ours.state[param]["sum"], torch.full((300,), 0.5))
        assert int(ours.state[param]["step"]) == 0


def test_whole_state_has_what_each_group_asks_for() -> None:
    """Two groups in one bucket, of which one has a momentum."""
    params = [nn.Parameter(torch.ones(300)) for _ in range(2)]
    ours = ShardedOptimizer([{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}], torch.optim.SGD)
    for param in params:
        param.grad = torch.ones(300)
    ours.step()
    state = ours.full_state_dict()["state"]
    assert len(ours.inside.buckets) == 1
    assert ["momentum_buffer" in state[number] for number in (0, 1)] == [False, True]


# ---- what does not fit


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (torch.optim.SGD, "saved by another optimizer, with no betas"),
        (torch.optim.AdamW, ""),
        (torch.optim.NAdam, "has 'mu_product', which torch.optim.adam.Adam does not keep"),
    ],
)
def test_the_state_of_another_class_is_refused_where_it_does_not_fit(cls: Any, says: str) -> None:
    params = [nn.Parameter(torch.ones(300)) for _ in range(2)]
    theirs = cls([params[0]], lr=0.1)
    params[0].grad = torch.ones(300)
    theirs.step()
    ours = ShardedOptimizer([params[1]], torch.optim.Adam, lr=0.2)
    if says:
        with pytest.raises(ValueError, match=says):
            ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["lr"] == 0.2
    else:
        ours.load_state_dict(theirs.state_dict())
        assert int(ours.state[params[1]]["step"]) == 1


def test_a_checkpoint_of_another_class_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    zerox.save(tmp_path / "x", model, ShardedOptimizer(model.parameters(), torch.optim.SGD))
    other = ShardedOptimizer(model.parameters(), torch.optim.RMSprop)
    with pytest.raises(zerox.CheckpointError, match=r"has the rule 'torch.optim.rmsprop.RMSprop', and was saved with"):
        zerox.load(tmp_path / "x", model, other, strict=False)


def told_then_asked_for_all(rank: int, _: int) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """Two groups are given options that make new state, and the whole state is asked for before the next step.

    Gradients are the same on all ranks, so their mean is too.
    """
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(5000, generator=generator)) for _ in range(2)]
    optimizer = ShardedOptimizer([{"params": [param]} for param in params], torch.optim.RMSprop, lr=0.1)

    def step() -> None:
        for param in params:
            param.grad = torch.arange(5000.0) / 1000
        optimizer.step()
        optimizer.zero_grad()

    step()
    optimizer.param_groups[0]["centered"] = True
    optimizer.param_groups[1]["momentum"] = 0.9
    optimizer.full_state_dict()
    step()
    full = optimizer.full_state_dict()
    return list(optimizer.inside.buckets[0].state), full.get("state", {})


def test_ranks_keep_new_state_in_one_order_also_if_all_of_it_is_asked_for_first() -> None:
    """They gather it in that order: with another one they would take each other's averages for momenta."""
    [(_, alone)] = run_ranks(told_then_asked_for_all, 1)
    (keys, full), (others_keys, _) = run_ranks(told_then_asked_for_all, 2)
    wrong = [
        (number, key)
        for number, state in alone.items()
        for key, value in state.items()
        if not same_bits(full[number][key], value)
    ]
    assert not wrong
    assert keys == others_keys
