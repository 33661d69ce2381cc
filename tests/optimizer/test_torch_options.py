"""What torch.optim.AdamW takes and refuses is taken and refused here: values kept alike, same type, same words."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam

Make = Callable[..., torch.optim.Optimizer]


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, foreach=False, **options)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(1, 1))


def twice(make: Make) -> Any:
    shared = weight()
    return make([shared, shared])


def in_two_groups(make: Make) -> Any:
    shared = weight()
    return make([{"params": shared}, {"params": shared}])


def tensors(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


# All of torch's own cases for AdamW on the CPU, and some beside them.
REFUSED: dict[str, Callable[[Make], Any]] = {
    "a bare parameter": lambda make: make(weight()),
    "nothing": lambda make: make([]),
    "None": lambda make: make(None),
    "no tensors": lambda make: make([3]),
    "a dict of parameters": lambda make: make({"a": weight()}),
    "no leaf": lambda make: make([weight() * 2]),
    "a set in a group": lambda make: make([{"params": {weight()}}]),
    "a group without params": lambda make: make([{"lr": 1.0}]),
    "one in two groups": in_two_groups,
    "a name for some": lambda make: make([("weight", weight()), weight()]),
    "no name for the first": lambda make: make([weight(), ("weight", weight())]),
    "names in some groups": lambda make: make([{"params": [weight()]}, {"params": [("weight", weight())]}]),
    "a string": lambda make: make("weights"),
    "lr a string": lambda make: make([weight()], lr="fast"),
    "lr None": lambda make: make([weight()], lr=None),
    "eps None": lambda make: make([weight()], eps=None),
    "weight_decay None": lambda make: make([weight()], weight_decay=None),
    "betas a number": lambda make: make([weight()], betas=0.9),
    "betas of strings": lambda make: make([weight()], betas=("a", "b")),
    "lr < 0": lambda make: make([weight()], lr=-1.0),
    "tensor lr < 0": lambda make: make([weight()], lr=torch.tensor(-1.0)),
    "lr NaN": lambda make: make([weight()], lr=float("nan")),
    "tensor lr of two": lambda make: make([weight()], lr=torch.tensor([0.1, 0.2])),
    "eps < 0": lambda make: make([weight()], eps=-1e-8),
    "eps NaN": lambda make: make([weight()], eps=float("nan")),
    "beta1 1": lambda make: make([weight()], betas=(1.0, 0.0)),
    "beta1 < 0": lambda make: make([weight()], betas=(-0.1, 0.9)),
    "beta2 1": lambda make: make([weight()], betas=(0.9, 1.0)),
    "beta2 NaN": lambda make: make([weight()], betas=(0.9, float("nan"))),
    "tensor beta 1": lambda make: make([weight()], betas=tensors(1.0, 0.9)),
    "one beta": lambda make: make([weight()], betas=(0.9,)),
    "float and tensor betas": lambda make: make([weight()], betas=(0.9, torch.tensor(0.99))),
    "tensor and float betas": lambda make: make([weight()], betas=(torch.tensor(0.9), 0.99)),
    "betas of integers": lambda make: make([weight()], betas=(0, 0.99)),
    "weight_decay < 0": lambda make: make([weight()], weight_decay=-1),
    "weight_decay NaN": lambda make: make([weight()], weight_decay=float("nan")),
}


def outcome(case: Callable[[Make], Any], make: Make) -> str:
    try:
        case(make)
    except Exception as error:
        # Python's own words name two values in the order in which they are compared, and ours the option before them.
        words = re.sub(r"^betas must be two numbers, got [^:]*: ", "", str(error))
        words = "not comparable" if "not supported between instances of" in words else words
        return f"{type(error).__name__}: {words}"
    return "taken"


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(case: str) -> None:
    ours, theirs = (outcome(REFUSED[case], make) for make in (FusedShardedAdam, adamw))
    assert ours == theirs
    assert ours != "taken"


def test_betas_of_two_elements_are_refused() -> None:
    """In words of our own: torch's are an accident."""
    with pytest.raises(ValueError, match=r"Tensor betas\[1\] must be 1-element"):
        FusedShardedAdam([weight()], betas=(torch.tensor(0.9), torch.tensor([0.9, 0.99])))


TAKEN: dict[str, Callable[[Make], torch.optim.Optimizer]] = {
    "empty groups": lambda make: make([{"params": []}]),
    "a number for a name": lambda make: make([(1, weight())]),
    "a generator": lambda make: make(weight() for _ in range(2)),
    "a set": lambda make: make({weight()}),
    "named parameters": lambda make: make(nn.Linear(2, 2).named_parameters()),
    "two of one name": lambda make: make([("weight", weight()), ("weight", weight())]),
    "a group of one bare parameter": lambda make: make([{"params": weight(), "lr": 0.5}]),
    "named groups": lambda make: make([{"params": nn.Linear(2, 2).named_parameters(), "eps": 1.0}]),
    "an empty group beside another": lambda make: make([{"params": []}, {"params": [weight()]}]),
    "only frozen parameters": lambda make: make([weight().requires_grad_(False)]),
    "no gradients needed": lambda make: make([torch.ones(3)]),
    "one twice": twice,
    "an integer lr": lambda make: make([weight()], lr=1),
    "lr 0": lambda make: make([weight()], lr=0.0),
    "a tensor lr": lambda make: make([weight()], lr=torch.tensor(0.1)),
    "a tensor lr with a dimension": lambda make: make([weight()], lr=torch.tensor([0.1])),
    "tensor betas": lambda make: make([weight()], betas=tensors(0.5, 0.9)),
    "tensor betas with a dimension": lambda make: make([weight()], betas=(torch.tensor([0.5]), torch.tensor([0.9]))),
    "a list of betas": lambda make: make([weight()], betas=[0.5, 0.9]),
    "betas of a group": lambda make: make([{"params": weight(), "betas": (0, 0.9)}]),
    "an option of the user's own": lambda make: make([{"params": weight(), "decay_me": "no"}]),
}
OWN_OF_ADAMW = ("foreach", "fused", "capturable", "differentiable")


def described(case: Callable[[Make], torch.optim.Optimizer], make: Make) -> tuple[list[Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = case(make)
        groups = [
            {key: str(len(value) if key == "params" else value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        optimizer.step()
    return (
        [{key: value for key, value in group.items() if key not in OWN_OF_ADAMW} for group in groups],
        [f"{each.category.__name__}: {each.message}" for each in caught],
    )


@pytest.mark.parametrize("case", TAKEN)
def test_what_torch_takes_is_taken_and_kept_alike_with_its_warnings(case: str) -> None:
    ours, theirs = (described(TAKEN[case], make) for make in (FusedShardedAdam, adamw))
    assert ours == theirs


def test_printing_shows_every_group_as_torch_does() -> None:
    def build(make: Make) -> torch.optim.Optimizer:
        return make([{"params": weight(), "lr": 0.5}, {"params": [("w", weight())][0][1], "eps": 1.0}])

    ours, theirs = (repr(build(make)).split("\n") for make in (FusedShardedAdam, adamw))
    kept = [line for line in theirs if line.strip().split(":")[0] not in OWN_OF_ADAMW]
    assert ours == [line.replace("AdamW (", "FusedShardedAdam (") for line in kept]


ADDED: dict[str, Any] = {
    "no dict": lambda: [weight()],
    "no leaf": lambda: {"params": [weight() * 2]},
    "named beside unnamed": lambda: {"params": [("w", weight())]},
    "lr < 0": lambda: {"params": [weight()], "lr": -1.0},
    "no lr": lambda: {"params": [weight()], "lr": None},
    "complex": lambda: {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]},
}


def add_what_is_refused(rank: int, world_size: int) -> list[str]:
    """After each refusal the optimizer is as before, and still trains on all ranks."""
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedShardedAdam([param], lr=0.5, weight_decay=0.0)
    wrong = []
    for name, group in {**ADDED, "known already": lambda: {"params": [param]}}.items():
        raised = outcome(lambda _, group=group: optimizer.add_param_group(group()), adamw)
        if raised == "taken" or len(optimizer.param_groups) != 1:
            wrong.append(f"{name}: {raised}, {len(optimizer.param_groups)} groups")
        before = param.detach().clone()
        param.grad = torch.ones(4)
        optimizer.step()
        if torch.equal(param, before):
            wrong.append(f"{name}: no longer trains")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_refused_group_leaves_no_trace_on_any_rank(world_size: int) -> None:
    assert run_ranks(add_what_is_refused, world_size) == [[]] * world_size


def refused_on_one_rank(rank: int, world_size: int) -> list[str]:
    """Only rank 1's group differs: all ranks refuse, and can go on."""
    optimizer = FusedShardedAdam([weight()])
    raised = []
    for numel, lr in ((3 + rank, 0.1), (3, 0.1 + rank)):
        group = {"params": [nn.Parameter(torch.ones(numel))], "lr": lr}
        raised.append(outcome(lambda _, group=group: optimizer.add_param_group(group), adamw))
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.step()
    return raised


def test_a_group_that_differs_on_one_rank_is_refused_on_all_of_them() -> None:
    for raised in run_ranks(refused_on_one_rank, 2):
        assert all(each.startswith("ValueError: zerox: ranks must agree: rank 0 has") for each in raised), raised
