"""p.grad.mul_() and div_() by a number, once the gradient has left for its owner: as pipelines' schedules call them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

Change = Callable[[list[nn.Parameter]], object]


def grads_of(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def each(change: Callable[[Tensor], object]) -> Change:
    return lambda params: [change(grad) for grad in grads_of(params)]


WAYS: dict[str, tuple[Change, float]] = {
    "div_": (each(lambda grad: grad.div_(4)), 0.25),
    "mul_": (each(lambda grad: grad.mul_(0.5)), 0.5),
    "twice": (each(lambda grad: grad.mul_(0.5).div_(2.0)), 0.25),
    "by an operator": (each(lambda grad: grad.__itruediv__(8)), 0.125),
    "foreach": (lambda params: torch._foreach_mul_(grads_of(params), 0.25), 0.25),
    "foreach, divided": (lambda params: torch._foreach_div_(grads_of(params), 2.0), 0.5),
}


class Trained:
    def __init__(self, rank: int, stage: int) -> None:
        self.model = Chain(3)
        self.optimizer = FusedShardedAdam(
            self.model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20
        )
        self.rank = rank

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, seed: int) -> None:
        self.model(input_of(self.rank, seed)).square().sum().backward()

    def step(self) -> tuple[float, list[Tensor]]:
        norm = float(self.optimizer.clip_grad_norm_(1e-3))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, [param.detach().clone() for param in self.params]


def is_as_scaled(rank: int, stage: int, change: Change, factor: float) -> bool:
    """Bit for bit, in two steps of two backwards, after gradients that were discarded."""
    ours, theirs = Trained(rank, stage), Trained(rank, stage)
    ours.backward(7)
    change(ours.params)
    ours.optimizer.zero_grad()
    same = []
    for step in range(2):
        for made in (ours, theirs):
            made.backward(2 * step)
            made.backward(2 * step + 1)
        change(ours.params)
        theirs.optimizer.scale_grads_(factor)
        (norm, params), (expected_norm, expected) = ours.step(), theirs.step()
        same += [norm == expected_norm, all(map(torch.equal, params, expected))]
    return all(same)


def all_ways(rank: int, world_size: int) -> dict[str, bool]:
    return {f"{name}, {stage}": is_as_scaled(rank, stage, *way) for name, way in WAYS.items() for stage in (1, 2, 3)}


def test_it_is_as_scale_grads() -> None:
    for found in run_ranks(all_ways, 2):
        assert found == dict.fromkeys(found, True)


def one_alone(made: Trained) -> None:
    made.params[0].grad.div_(2)  # type: ignore[union-attr]


def other_numbers(made: Trained) -> None:
    each(lambda grad: grad.div_(2 + made.rank))(made.params)


def on_one_rank(made: Trained) -> None:
    if made.rank == 0:
        each(lambda grad: grad.div_(2))(made.params)


def before_a_backward(made: Trained) -> None:
    each(lambda grad: grad.div_(2))(made.params)
    made.backward(1)


def after_a_limit(made: Trained) -> None:
    made.optimizer.clip_grad_value_(0.5)
    each(lambda grad: grad.div_(2))(made.params)


REFUSALS: dict[str, tuple[Callable[[Trained], None], str]] = {
    "one alone": (one_alone, "that of 'layers.0.bias' by 1 and 'layers.0.weight' by 0.5: multiply all of them alike"),
    "other numbers": (other_numbers, "ranks multiplied p.grad by other numbers, this one by 0.[35]"),
    "on one rank": (on_one_rank, r"ranks multiplied p.grad by other numbers, this one by (0.5|1):"),
    "before a backward": (before_a_backward, "gradients were added after p.grad.* was multiplied"),
    "after a limit": (after_a_limit, r"p.grad.mul_\(\) was called after clip_grad_value_\(\)"),
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (misuse, _) in REFUSALS.items():
        made = Trained(rank, stage=2)
        made.backward(0)
        misuse(made)
        try:
            made.optimizer.step()
        except RuntimeError as error:
            found[name] = str(error)
        made.optimizer.zero_grad()  # and it goes on
        made.backward(3)
        made.step()
    return found


@functools.cache
def refusals() -> list[dict[str, Any]]:
    return run_ranks(refused, 2)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_can_t_be_told_is_an_error_on_all_ranks(name: str) -> None:
    for found in refusals():
        with pytest.raises(AssertionError, match=REFUSALS[name][1]):
            raise AssertionError(found[name])
