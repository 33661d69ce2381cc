"""Param groups that users change themselves, beside torch's optimizers with the same mean gradient and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.ranks.group import Ranks

SHAPES = [(10,), (70, 90), (8, 3), (300,), (5, 5), (40, 20)]
SPARE = 2  # the last ones, which no group has at first
Params = list[nn.Parameter]


def more(optimizer: Any, params: Params) -> None:
    """As Lightning's BaseFinetuning resumes."""
    copies = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    optimizer.param_groups = [*copies, {**copies[0], "params": params[-SPARE:], "lr": 0.01}]


def one_of_each(optimizer: Any, params: Params) -> None:
    for group, p in zip(optimizer.param_groups, params[-SPARE:], strict=True):
        group["params"].append(p)


def swapped(optimizer: Any, params: Params) -> None:
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[1] = other[1], one[0]


def inside_the_list(optimizer: Any, params: Params) -> None:
    optimizer.param_groups.insert(1, {**optimizer.param_groups[0], "params": params[-1:], "lr": 0.3})


def before_one(optimizer: Any, params: Params) -> None:
    optimizer.param_groups[0]["params"].insert(1, params[-1])


def merged(optimizer: Any, params: Params) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups = [{**first, "params": first["params"] + second["params"]}]


WAYS: dict[str, Callable[[Any, Params], object]] = {
    "another list": more,
    "append()": lambda optimizer, params: optimizer.param_groups[1]["params"].append(params[-1]),
    "append() to each": one_of_each,
    "insert()": before_one,
    "a group between": inside_the_list,
    "others' places": swapped,
    "reverse()": lambda optimizer, _: optimizer.param_groups.reverse(),
    "one group": merged,
    "a tuple": lambda optimizer, _: [g.update(params=tuple(g["params"])) for g in optimizer.param_groups],
}
MAKE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (FusedShardedAdam, torch.optim.AdamW),
    "amsgrad": (
        lambda groups, **options: FusedShardedAdam(groups, amsgrad=True, **options),
        lambda groups, **options: torch.optim.AdamW(groups, amsgrad=True, **options),
    ),
    "NAdam": (lambda groups, **options: ShardedOptimizer(groups, torch.optim.NAdam, **options), torch.optim.NAdam),
    "Adagrad": (lambda groups, **more: ShardedOptimizer(groups, torch.optim.Adagrad, **more), torch.optim.Adagrad),
}


def made() -> Params:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def grouped(params: Params) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.1}, {"params": params[2:-SPARE], "lr": 0.02}]


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def clear(params: Params) -> None:
    for p in params:
        p.grad = None


def train(optimizer: Any, params: Params, rank: int, step: int) -> None:
    torch.autograd.backward([(p * g).sum() for p, g in zip(params, gradients(rank, step), strict=True)])
    optimizer.step()
    optimizer.zero_grad()
    clear(params[-SPARE:])


def train_torch(optimizer: Any, params: Params, world_size: int, step: int) -> None:
    of_ranks = zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)
    for p, grads in zip(params, of_ranks, strict=True):
        p.grad = torch.stack(grads).sum(0) / world_size
    optimizer.step()
    clear(params)


def beside_torch(rank: int, world_size: int, stage: int, kind: str) -> list[str]:
    """What differs from torch's, by way. Groups are changed between steps, or between backward and step()."""
    wrong = []
    ours, torchs = MAKE[kind]
    for name, way in WAYS.items():
        params, theirs = made(), made()
        with torch.no_grad():
            params[-1].add_(rank)  # rank 0's are taken
        optimizer = ours(grouped(params), stage=stage, bucket_cap_mb=0.01)
        twin = torchs(grouped(theirs))
        for step in range(5):
            if step == 2:
                way(optimizer, params)
                way(twin, theirs)
            train(optimizer, params, rank, step)
            train_torch(twin, theirs, world_size, step)
        found = optimizer.full_state_dict()
        if found:
            expected = twin.state_dict()
            groups = [group["params"] for group in expected["param_groups"]]
            wrong += [] if [group["params"] for group in found["param_groups"]] == groups else [f"{name}: groups"]
            for number, state in expected["state"].items():
                own = found["state"][number]
                wrong += [f"{name}: {k} {number}" for k, v in state.items() if not torch.allclose(own[k], v, atol=1e-6)]
        trained = [any(p is q for group in twin.param_groups for q in group["params"]) for p in theirs]
        pairs = [(p, q) for p, q, has in zip(params, theirs, trained, strict=True) if has]
        wrong += [f"{name}: {tuple(p.shape)}" for p, q in pairs if not torch.allclose(p, q, atol=1e-6)]
    return wrong


@pytest.mark.parametrize(
    ("world_size", "stage", "kind"),
    [
        (1, 2, "AdamW"),
        (2, 1, "AdamW"),
        (2, 2, "AdamW"),
        (2, 3, "AdamW"),
        (3, 2, "amsgrad"),
        (2, 2, "NAdam"),
        (2, 3, "Adagrad"),
    ],
)
def test_groups_that_were_changed_are_trained_as_by_torch(world_size: int, stage: int, kind: str) -> None:
    assert run_ranks(beside_torch, world_size, stage, kind) == [[]] * world_size


# ---- what is refused


def gone(optimizer: Any, params: Params) -> None:
    del optimizer.param_groups[1]["params"][0]


def twice(optimizer: Any, params: Params) -> None:
    optimizer.param_groups[0]["params"].append(params[3])


def divided(optimizer: Any, params: Params) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [moved], "gradient_divisor": 1.0})


GONE = "was taken out of param_groups, and lies in a bucket with others: put it back, and freeze it"
AGREE = "ranks must agree"
REFUSED: dict[str, tuple[Callable[[Any, Params], object], tuple[int, ...], str]] = {
    "gone": (gone, (0, 1), GONE),
    "gone on rank 1": (gone, (1,), GONE),
    "pop()": (lambda optimizer, _: optimizer.param_groups.pop(), (0, 1), GONE),
    "del on rank 0": (lambda optimizer, _: optimizer.param_groups.__delitem__(0), (0,), GONE),
    "twice": (twice, (0, 1), "param_groups have a parameter twice"),
    "divided": (divided, (0, 1), "its gradient is divided by another gradient_divisor"),
    "no group": (lambda optimizer, _: optimizer.param_groups.append({"lr": 1.0}), (1,), "must be a dict with 'params'"),
    "no tensor": (lambda optimizer, _: optimizer.param_groups[0]["params"].append("x"), (0,), "no tensor"),
    "new on rank 0": (WAYS["append()"], (0,), AGREE),
    "new on rank 1": (more, (1,), AGREE),
    "moved on rank 1": (swapped, (1,), AGREE),
}


def refused(rank: int, world_size: int) -> list[str]:
    wrong = []
    for name, (change, on, expected) in REFUSED.items():
        params = made()
        optimizer = FusedShardedAdam(grouped(params), bucket_cap_mb=0.01)
        kept = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        train(optimizer, params, rank, 0)
        if rank in on:
            change(optimizer, params)
        for _ in range(2):  # until the groups are as they were
            try:
                train(optimizer, params, rank, 1)
                wrong.append(f"{name}: goes on")
            except (RuntimeError, ValueError) as error:
                wrong += [] if expected in str(error) else [f"{name}: {error}"]
            optimizer.zero_grad()
            clear(params)
        optimizer.param_groups[:] = kept
        train(optimizer, params, rank, 1)
    return wrong


def test_what_can_t_be_taken_in_raises_on_all_ranks_until_it_is_as_it_was() -> None:
    assert run_ranks(refused, 2) == [[]] * 2


# ---- state


def resumed(rank: int, world_size: int, stage: int, frozen: bool) -> list[str]:
    """State that is loaded for groups that the next step() takes in, or for parameters that are frozen until later."""

    def continued(params: Params, optimizer: Any) -> list[Tensor]:
        for step in range(3, 5):
            train(optimizer, params, rank, step)
        states = [optimizer.full_state(p) for group in optimizer.param_groups for p in group["params"]]
        return [*(p.detach() for p in params), *(value for state in states for value in state.values())]

    first = made()
    optimizer = FusedShardedAdam(grouped(first), stage=stage, bucket_cap_mb=0.01)
    train(optimizer, first, rank, 0)
    optimizer.add_param_group({"params": first[-SPARE:], "lr": 0.01})
    for step in range(1, 3):
        train(optimizer, first, rank, step)
    with optimizer.whole():
        values = [p.detach().clone() for p in first]
    saved = optimizer.state_dict()

    second = made()
    with torch.no_grad():
        for p, value in zip(second, values, strict=True):
            p.copy_(value)
    again = FusedShardedAdam(grouped(second), stage=stage, bucket_cap_mb=0.01)
    for p in second[-SPARE:]:
        p.requires_grad_(not frozen)
    more(again, second)
    again.load_state_dict(saved)
    kept = again.state_dict()["state"].keys() == saved["state"].keys()
    if frozen:
        again.synchronize()
        kept = kept and again.state_dict()["state"].keys() == saved["state"].keys()
        for p in second[-SPARE:]:
            p.requires_grad_(True)
    pairs = list(zip(continued(first, optimizer), continued(second, again), strict=True))
    return [f"{i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)] + ([] if kept else ["state_dict()"])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_state_waits_for_parameters_that_are_taken_in_later(stage: int, frozen: bool) -> None:
    assert run_ranks(resumed, 2, stage, frozen) == [[]] * 2


def test_a_group_that_was_added_by_its_method_is_no_news_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have compared it already."""
    params, compared = made(), []
    optimizer = FusedShardedAdam(grouped(params))
    optimizer.add_param_group({"params": params[-SPARE:], "lr": 0.01})
    monkeypatch.setattr(Ranks, "check_same", lambda *_, **__: compared.append(True))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not compared


def zeroed(rank: int, world_size: int, stage: int, set_to_none: bool) -> list[bool]:
    """A parameter that has a gradient is appended, and zero_grad() follows before ranks have synchronized."""
    params, theirs = made(), made()
    optimizer = FusedShardedAdam(grouped(params), stage=stage, bucket_cap_mb=0.01)
    twin = torch.optim.AdamW(grouped(theirs))
    for step in range(2):
        torch.autograd.backward([(p * g).sum() for p, g in zip(params, gradients(rank, step), strict=True)])
        optimizer.step()
        train_torch(twin, theirs, world_size, step)
        if step == 0:
            WAYS["append()"](optimizer, params)
            WAYS["append()"](twin, theirs)
        optimizer.zero_grad(set_to_none)
    return [torch.allclose(p, q, atol=1e-6) for p, q in zip(params, theirs, strict=True)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 1), (2, 2), (2, 3)])
def test_zero_grad_knows_what_is_in_the_groups_now(world_size: int, stage: int, set_to_none: bool) -> None:
    for found in run_ranks(zeroed, world_size, stage, set_to_none):
        assert all(found)
