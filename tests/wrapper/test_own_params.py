"""Parameters of an optimizer that no wrapper has, beside others that one has, are each rank's own, as under torch's."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel as OfTorch

import zerox
from tests.ranks import Once, run_ranks
from tests.wrapper.own_cases import OWN_CASES, Recommender, trained
from tests.wrapper.twins import STAGES, Script, assert_same, of_zerox, values_of, with_both


def all_cases(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    return with_both(rank, world_size, OWN_CASES)


ON_2 = Once(all_cases, 2)
ON_3 = Once(all_cases, 3)


@pytest.mark.parametrize("name", OWN_CASES)
def test_they_are_trained_as_under_torch(name: str) -> None:
    assert_same(ON_2(), name)


@pytest.mark.parametrize("name", OWN_CASES)
def test_on_3_ranks_too_of_which_one_has_no_tables(name: str) -> None:
    assert_same(ON_3(), name)


RMSPROP = partial(zerox.ShardedOptimizer, optimizer_class=torch.optim.RMSprop)
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, zerox.FusedShardedSGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, RMSPROP, {"lr": 0.01}),
}


def others(rank: int, _: int, name: str) -> list[list[list[Tensor]]]:
    of_torch, ours, options = OTHERS[name]
    found = []
    for sparse in (False, True) if name == "SGD" else (False,):
        values = []
        for stage in (0, *STAGES):
            wrap = zerox.DistributedDataParallel if stage else OfTorch
            script = Script(rank, wrap, partial(ours, stage=stage) if stage else of_torch)
            model = Recommender(script, sparse)
            # torch's momentum knows no sparse gradients
            chosen = {"lr": 0.1} if sparse else options
            trained(model, script.optimizer(model.groups(), **chosen))
            values.append([each.double() for each in values_of(model)])
        found.append(values)
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_with_other_rules_and_sparse_gradients(name: str) -> None:
    for of_rank in run_ranks(others, 2, name):
        for expected, *ours in of_rank:
            for values in ours:
                for value, other in zip(values, expected, strict=True):
                    torch.testing.assert_close(value, other, rtol=0, atol=1e-6)


def clipped(rank: int, _: int, stage: int, p: float) -> None:
    """One norm of the shared gradients, once, and of all ranks' own ones."""
    script = of_zerox(rank, stage)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    model(0).square().mean().backward()
    own = [param.grad.clone() for param in model.tables.parameters()]
    shared = [optimizer.full_grad(param).clone() for param in model.top.parameters()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    expected = nn.utils.get_total_norm([*shared, *(grad for each in everyone for grad in each)], p)
    norm = optimizer.clip_grad_norm_(0.01, p)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for param, grad in zip(model.tables.parameters(), own, strict=True):
        torch.testing.assert_close(param.grad, grad * (0.01 / (expected + 1e-6)), rtol=1e-5, atol=0)
    optimizer.clip_grad_value_(1e-6)
    assert all(float(param.grad.abs().max()) <= 1e-6 for param in model.tables.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in model.tables.parameters())


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_s_clip_is_by_one_norm(stage: int, p: float) -> None:
    run_ranks(clipped, 2, stage, p)


def saved(rank: int, world_size: int) -> None:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    trained(model, optimizer)
    own = sum(param.nbytes for param in model.tables.parameters())
    found = optimizer.memory_bytes()
    assert found.parameters > own
    assert found.moments >= 2 * own
    for to in range(world_size):
        whole = optimizer.full_state_dict(to=to)
        if rank == to:  # torch's class takes it, for this rank's model
            plain = torch.optim.AdamW(model.groups(), lr=0.01)
            plain.load_state_dict(whole)
            assert set(plain.state) == set(model.parameters())
            assert all(state["exp_avg"].shape == param.shape for param, state in plain.state.items())
    of_other: list[Any] = [None] * world_size
    dist.all_gather_object(of_other, optimizer.state_dict()["state"][0])
    state = optimizer.state_dict()
    state["state"] = {**state["state"], 0: of_other[1 - rank]}
    with pytest.raises(ValueError, match=r"exp_avg of shape .* was saved for a parameter that is this rank's own"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())
    trained(model, optimizer, 1)


def test_whole_state_has_a_rank_s_own_and_other_ranks_are_refused() -> None:
    run_ranks(saved, 2)


def refusals(rank: int, _: int) -> None:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    beside = "parameters that no DistributedDataParallel has, as 'tables.0.weight'"
    calls = [
        (lambda: optimizer.mean_over(3), "divide the loss"),
        (lambda: optimizer.unscale_grads_(torch.tensor(0.5)), "use torch.amp.GradScaler"),
        (lambda: zerox.clip_grad_norm_([optimizer], 1.0), r"call optimizer.clip_grad_norm_\(\)"),
    ]
    for call, way_out in calls:
        model(0).square().mean().backward()
        with pytest.raises((RuntimeError, ValueError), match=f"{beside}.*{way_out}"):
            call()
        optimizer.zero_grad()
    for options, group in (
        ({"gradient_divisor": 2.0}, {}),
        ({}, {"rule": "lion"}),
        ({}, {"sparse": True, "weight_decay": 0.0}),
    ):
        with pytest.raises(ValueError, match=r"param group 0: .* does not go with parameters that no Distributed"):
            script.optimizer(model.groups(**group), lr=0.01, **options)
    options = dataclasses.replace(optimizer.inside.options, capturable=True)
    with pytest.raises(ValueError, match="capturable=True does not go with"):
        optimizer.inside.calls.own.check(optimizer.param_groups, optimizer.inside.rules, options, False)


def test_what_does_not_know_them_is_refused_by_name() -> None:
    run_ranks(refusals, 2)


def asked(rank: int, world_size: int, stage: int) -> None:
    """Calls about one parameter say what it is, on all ranks, and where its gradient and its state are."""
    script = of_zerox(rank, stage)
    model = Recommender(script)
    optimizer = script.optimizer(model.named_parameters(), lr=0.01)
    trained(model, optimizer, 1)
    own, shared = model.tables[0].weight, model.top.module[0].weight
    calls = {
        "full_grad": optimizer.full_grad,
        "set_full_grad_": lambda p: optimizer.set_full_grad_(p, torch.ones_like(p)),
        "full_state": optimizer.full_state,
        "set_full_state_": lambda p: optimizer.set_full_state_(p, step=9),
    }
    for name, call in calls.items():
        said = rf"{name}\(\): 'tables.0.weight' is this rank's own parameter.* p.grad .* optimizer.state\[p\], on"
        with pytest.raises(ValueError, match=said):
            call(own)
        with pytest.raises(ValueError, match=said):
            call(own if rank == 0 else shared)
    with pytest.raises(ValueError, match=r"parameters: 'tables.0.weight' is this rank's own.* pass none of these"):
        optimizer.clip_grad_norm_(1.0, parameters=[own])
    for glob in ("tables.*.weight", "*.weight"):
        with pytest.raises(ValueError, match=r"stands for 'tables.0.weight', this rank's own parameter"):
            zerox.Sparsity(optimizer, {glob: 0.5})
    for to in range(world_size):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.full_state_dict(to=to)
            optimizer.consolidate_state_dict(to=to)
        said = [str(each.message) for each in found]
        assert len(said) == (2 if rank == to else 0), said
        assert all(f"whole state of rank {to} has that rank's own parameters only" in each for each in said)
    with pytest.warns(UserWarning, match=r"'tables.0.weight' is this rank's own .* dcp.save\(\) would lose"):
        get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_calls_about_one_say_what_it_is(stage: int) -> None:
    run_ranks(asked, 2, stage)


def built_before(rank: int, _: int, stage: int) -> None:
    script = of_zerox(rank, stage)
    net, other = script.net(), nn.Linear(16, 16)
    optimizer = script.optimizer([*net.parameters(), *other.parameters()], lr=0.01)
    model = script.wrap(net)
    before = values_of(net)
    model(other(script.data())).square().mean().backward()
    with pytest.raises(ValueError, match=r"parameter 'param 4' .*is not wrapped as others .* wrap the model first"):
        optimizer.step()
    assert all(torch.equal(one, another) for one, another in zip(before, values_of(net), strict=True))
    again: Sequence[Tensor] = [*net.parameters(), *other.parameters()]
    del optimizer
    later = script.optimizer(again, lr=0.01)
    model(other(script.data())).square().mean().backward()
    later.step()


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_took_them_before_the_wrap_says_so(stage: int) -> None:
    run_ranks(built_before, 2, stage)


def clipped_by_torch(rank: int, _: int, stage: int) -> None:
    script = of_zerox(rank, stage)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    model(0).square().mean().backward()
    before = values_of(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    with pytest.raises(RuntimeError, match="mul_"):
        optimizer.step()
    assert all(torch.equal(one, another) for one, another in zip(before, values_of(model), strict=True))
    optimizer.zero_grad()
    trained(model, optimizer, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_torch_s_clip_of_both_kinds_raises_on_all_ranks(stage: int) -> None:
    run_ranks(clipped_by_torch, 2, stage)


def overflowed(rank: int, _: int, stage: int) -> None:
    """In a table of rank 1 alone: all ranks skip the step."""
    script = of_zerox(rank, stage)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = values_of(model)
        optimizer.zero_grad()
        scaler.scale(model(step).square().mean()).backward()
        if step == rank == 1:
            model.tables[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        is_same = [torch.equal(one, other) for one, other in zip(before, values_of(model), strict=True)]
        assert all(is_same) if step == 1 else not any(is_same)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("stage", [2, 3])
def test_an_overflow_on_one_rank_has_all_skip(stage: int) -> None:
    run_ranks(overflowed, 2, stage)


def joined(rank: int, _: int, stage: int) -> None:
    """A rank that follows leaves its tables as its last batch did."""
    script = of_zerox(rank, stage)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    with optimizer.join():
        trained(model, optimizer, 1 + 2 * rank)
        tables = values_of(model.tables)
    assert all(torch.equal(one, other) for one, other in zip(tables, values_of(model.tables), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_follows_in_join_leaves_them(stage: int) -> None:
    run_ranks(joined, 2, stage)


def refused_group(rank: int, _: int) -> None:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    optimizer = script.optimizer(model.top.parameters(), lr=0.01)
    with pytest.raises(ValueError, match="the rule 'lion' does not go with"):
        optimizer.add_param_group({"params": list(model.tables.parameters()), "rule": "lion"})
    assert len(optimizer.param_groups) == 1
    assert not optimizer.inside.calls.own.params
    optimizer.add_param_group({"params": []})
    optimizer.param_groups[1]["params"].extend(model.tables.parameters())  # as users of torch do
    trained(model, optimizer)
    assert all(optimizer.state[param]["step"] == 3 for param in model.tables.parameters())


def test_a_group_is_refused_whole_and_they_may_be_put_into_groups() -> None:
    run_ranks(refused_group, 2)
