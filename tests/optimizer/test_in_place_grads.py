"""In-place operators on p.grad, once the gradient has left for its owner: the mean is as if p.grad were whole."""

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
    "by a tensor": (each(lambda grad: grad.mul_(torch.tensor([0.5]))), 0.5),
    "foreach, by a tensor": (lambda params: torch._foreach_mul_(grads_of(params), torch.tensor(0.25)), 0.25),
    "through data": (each(lambda grad: grad.data.mul_(0.5)), 0.5),
    "through detach()": (each(lambda grad: grad.detach().div_(4)), 0.25),
    "by 0": (each(lambda grad: grad.mul_(0)), 0.0),
}


class Trained:
    def __init__(self, rank: int, stage: int, **options: Any) -> None:
        self.model = Chain(3)
        options = {"lr": 1e-2, "stage": stage, "bucket_cap_mb": LAYER_CAP / 2**20, **options}
        self.optimizer = FusedShardedAdam(self.model.named_parameters(), **options)
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


def some(*changes: Callable[[Tensor], object]) -> Change:
    """The first to the first parameter, and so on; nothing to the others."""

    def change(params: list[nn.Parameter]) -> None:
        for do, grad in zip(changes, grads_of(params), strict=False):
            do(grad)

    return change


def by_its_norm(grad: Tensor) -> None:
    coefficient = 1e-2 / (grad.data.norm(2) + 1e-6)
    if coefficient < 1:
        grad.data.mul_(coefficient)


# Beside stage 1, where p.grad is whole and torch does it.
CHANGES: dict[str, Change] = {
    "one alone": some(lambda grad: grad.div_(3)),
    "each by another number": some(
        lambda grad: grad.mul_(0.3), lambda grad: grad.mul_(torch.tensor(0.7)), Tensor.zero_
    ),
    "clamp_": each(lambda grad: grad.clamp_(-1e-2, 2e-2)),
    "clamp_, one end": some(lambda grad: grad.clamp_(min=0), lambda grad: grad.clamp_(max=0.0)),
    "clamp_min_, clamp_max_": some(
        lambda grad: grad.clamp_min_(0.01), lambda grad: grad.clamp_max_(torch.tensor(-0.1))
    ),
    "clamp_ of a product": each(lambda grad: grad.mul_(0.3).clamp_(-1e-2, 1e-2)),
    "product of what is clamped": each(lambda grad: grad.clamp_(-1e-2, 1e-2).mul_(0.3)),
    "nan_to_num_": each(lambda grad: grad.div_(0).nan_to_num_(0.5, 1.0, -1.0)),
    "nan_to_num_, defaults": some(lambda grad: torch.nan_to_num_(grad.mul_(float("nan")))),
    "fill_": some(lambda grad: grad.fill_(0.5), lambda grad: grad.fill_(torch.tensor(2.0)).div_(3)),
    "foreach clamps": lambda params: torch._foreach_clamp_max_(grads_of(params), 1e-2),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 1e-2),
    "clip_grad_value_, no foreach": lambda params: nn.utils.clip_grad_value_(params, 1e-2, foreach=False),
    "by each one's norm": each(by_its_norm),
}


def trained(rank: int, stage: int, change: Change) -> list[Tensor]:
    """Two steps; the second one has gradients added to what was changed, and changed again."""
    made = Trained(rank, stage)
    made.backward(0)
    change(made.params)
    made.optimizer.step()
    made.optimizer.zero_grad()
    made.backward(1)
    change(made.params)
    made.backward(2)
    change(made.params)
    made.optimizer.step()
    with made.optimizer.whole():
        return [param.detach().clone() for param in made.params]


def changed(rank: int, world_size: int) -> dict[str, float]:
    found = {}
    for name, change in CHANGES.items():
        expected = trained(rank, 1, change)
        for stage in (2, 3):
            ours = trained(rank, stage, change)
            found[f"{name}, {stage}"] = max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_as_on_whole_gradients(world_size: int) -> None:
    for found in run_ranks(changed, world_size):
        assert {name: apart for name, apart in found.items() if not apart <= 1e-6} == {}


def added(rank: int, world_size: int, factor: float) -> dict[str, bool]:
    """Without zero_grad(): the next backward adds to what was multiplied, as step() used it."""
    found = {}
    params = {}
    for stage in (1, 2, 3):
        made = Trained(rank, stage)
        for step in range(3):
            made.backward(step)
            each(lambda grad: grad.mul_(factor))(made.params)
            made.optimizer.step()
        with made.optimizer.whole():
            params[stage] = [param.detach().clone() for param in made.params]
        found[f"{stage}"] = all(torch.allclose(a, b, atol=1e-7) for a, b in zip(params[stage], params[1], strict=True))
    return found


def test_gradients_are_added_to_what_was_multiplied() -> None:
    for found in run_ranks(added, 2, 0.25):
        assert found == dict.fromkeys(found, True)


def discarded(rank: int, world_size: int) -> bool:
    """A factor is of the gradients that had it, however they were discarded."""
    ours, theirs = Trained(rank, 2), Trained(rank, 2)
    for step, discard in enumerate((ours.model.zero_grad, ours.optimizer.zero_grad)):
        ours.backward(7)
        each(lambda grad: grad.mul_(0.25))(ours.params)
        if step == 0:
            float(ours.params[0].grad.norm())  # type: ignore[union-attr]  # ranks synchronize: the factor waits for step()
        discard()
        for made in (ours, theirs):
            made.backward(step)
            made.optimizer.step()
            made.optimizer.zero_grad()
    return all(map(torch.equal, ours.params, theirs.params))


def test_what_was_done_is_discarded_with_the_gradient() -> None:
    assert run_ranks(discarded, 2) == [True, True]


def assigned(rank: int, world_size: int) -> bool:
    """What was done to a gradient that is discarded is not done to one that is put there by hand."""
    ours, theirs = Trained(rank, 2), Trained(rank, 2)
    for made in (ours, theirs):
        made.backward(0)
        if made is ours:
            each(lambda grad: grad.mul_(0.25))(made.params)
            made.params[0].grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]
        for number, param in enumerate(made.params):
            param.grad = torch.full_like(param, 0.1 * number + rank)
        made.optimizer.step()
    return all(map(torch.equal, ours.params, theirs.params))


def test_gradients_assigned_by_hand_are_new() -> None:
    assert run_ranks(assigned, 2) == [True, True]


def other_numbers(made: Trained) -> None:
    each(lambda grad: grad.div_(2 + made.rank))(made.params)


def on_one_rank(made: Trained) -> None:
    if made.rank == 0:
        each(lambda grad: grad.div_(2))(made.params)


def one_on_one_rank(made: Trained) -> None:
    if made.rank == 1:
        made.params[1].grad.clamp_(-1.0, 1.0)  # type: ignore[union-attr]


def of_some(made: Trained) -> None:
    """As torch's clip of gradients that one rank lacks."""
    if made.rank == 0:
        made.params[0].grad = None
    made.params[1].grad.mul_(0.5 + made.rank)  # type: ignore[union-attr]


def before_another_backward(made: Trained) -> None:
    if made.rank == 0:
        each(lambda grad: grad.mul_(0.5))(made.params)
    made.backward(1)
    if made.rank == 1:
        each(lambda grad: grad.mul_(0.5))(made.params)


def after_a_limit(made: Trained) -> None:
    made.optimizer.clip_grad_value_(0.5)
    each(lambda grad: grad.div_(2))(made.params)


REFUSALS: dict[str, tuple[Callable[[Trained], None], str]] = {
    "other numbers": (
        other_numbers,
        r"to all gradients.*rank 0 div_\(2\.0\), rank 1 div_\(3\.0\).*Nothing was updated",
    ),
    "on one rank": (on_one_rank, r"to all gradients.*rank 0 div_\(2\.0\), rank 1 nothing"),
    "one on one rank": (
        one_on_one_rank,
        r"to the gradient of parameter 'layers\.0\.bias'.*rank 0 nothing, rank 1 clamp_\(-1\.0, 1\.0\)",
    ),
    "of some": (of_some, r"parameter 'layers\.0\.bias'.*rank 0 mul_\(0\.5\), rank 1 mul_\(1\.5\)"),
    "before another backward": (
        before_another_backward,
        r"to all gradients.*rank 0 mul_\(0\.5\) before a later backward.*, rank 1 mul_\(0\.5\)",
    ),
    "after a limit": (after_a_limit, r"p.grad.div_\(\) was called after clip_grad_value_\(\)"),
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (misuse, _) in REFUSALS.items():
        made = Trained(rank, stage=2)
        made.backward(0)
        misuse(made)
        before = [param.detach().clone() for param in made.params]
        try:
            made.optimizer.step()
        except RuntimeError as error:
            found[name] = str(error)
        assert all(map(torch.equal, before, made.params)), "something was updated"
        made.optimizer.zero_grad()  # and it goes on
        made.backward(3)
        made.step()
    return found


@functools.cache
def refusals() -> list[dict[str, Any]]:
    return run_ranks(refused, 2)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_ranks_did_unlike_is_an_error_on_all_of_them(name: str) -> None:
    for found in refusals():
        with pytest.raises(AssertionError, match=REFUSALS[name][1]):
            raise AssertionError(found[name])


def without_some(rank: int, world_size: int) -> bool:
    """All that a rank has are multiplied alike: nobody needs to have the same ones."""
    ours, theirs = Trained(rank, 2), Trained(rank, 2)
    for made in (ours, theirs):
        made.model(input_of(rank, 0)).square().sum().backward()
        if rank == 1:
            made.params[0].grad = None
    each(lambda grad: grad.mul_(0.5))(ours.params)
    theirs.optimizer.scale_grads_(0.5)
    for made in (ours, theirs):
        made.optimizer.step()
    return all(map(torch.equal, ours.params, theirs.params))


def test_a_factor_of_all_may_be_of_other_gradients_on_each_rank() -> None:
    assert run_ranks(without_some, 2) == [True, True]


def test_an_operator_inside_a_backward_is_refused() -> None:
    """p.grad is the whole mean for no hook: other gradients are still under way."""
    model = Chain(2)
    optimizer = FusedShardedAdam(model.named_parameters(), bucket_cap_mb=LAYER_CAP / 2**20)
    first, last = model.layers[0].weight, model.layers[-1].weight
    first.register_hook(lambda grad: last.grad.mul_(0.5) if last.grad is not None else None)
    with pytest.raises(RuntimeError, match=r"mul_.*inside a backward"):
        model(input_of(0)).square().mean().backward()
    optimizer.zero_grad()
