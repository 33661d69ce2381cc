"""Gradients that add up, are discarded, zeroed or assigned between backwards, as torch would have it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import LAYER_CAP, Chain, GradsOfModel, gradients_of, input_of, mean_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.grads.placeholder import ShardedGrad
from zerox.ranks.group import find_ranks


class Case:
    """A model on this rank, zerox's gradients of it, and what autograd alone gives for any rank's input."""

    def __init__(self, rank: int, world_size: int, stage: int = 2) -> None:
        self.rank, self.world_size = rank, world_size
        self.model = Chain(3)
        self.params = list(self.model.parameters())
        self.ours = GradsOfModel(find_ranks(None), self.params, LAYER_CAP, stage)
        self.grads = self.ours.grads

    def loss(self, seed: int, rank: int | None = None) -> Tensor:
        return self.model(input_of(self.rank if rank is None else rank, seed)).square().sum()

    def backward(self, seed: int, sync: bool = True) -> None:
        with nullcontext() if sync else self.grads.no_sync():
            self.loss(seed).backward()

    def mean(self, *seeds: int) -> list[Tensor | None]:
        """The mean over the ranks of the sum over the backwards."""
        return mean_of(
            [gradients_of(self.model, *(self.loss(seed, rank) for seed in seeds)) for rank in range(self.world_size)]
        )

    def expect(self, expected: list[Tensor | None]) -> None:
        self.ours.sync()
        self.ours.expect(expected)


def backwards_without_zero_grad(rank: int, world_size: int, stage: int) -> None:
    case = Case(rank, world_size, stage)
    case.backward(0)
    case.backward(1)
    case.expect(case.mean(0, 1))
    case.backward(2)  # a step doesn't consume gradients
    case.expect(case.mean(0, 1, 2))
    case.expect(case.mean(0, 1, 2))


def no_sync_then_sync(rank: int, world_size: int, stage: int) -> None:
    case = Case(rank, world_size, stage)
    case.backward(0, sync=False)
    case.backward(1, sync=False)
    assert case.ours.manager.flights.num_launched == 0
    assert not any(isinstance(p.grad, ShardedGrad) for p in case.params)
    case.backward(2)
    case.expect(case.mean(0, 1, 2))
    case.grads.zero(set_to_none=True)
    case.backward(3)
    case.expect(case.mean(3))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", [backwards_without_zero_grad, no_sync_then_sync])
def test_backwards_add_up_as_in_torch(case, stage: int) -> None:
    run_ranks(case, 3, stage)


def no_sync_only(rank: int, world_size: int) -> None:
    case = Case(rank, world_size)
    case.backward(0, sync=False)
    case.expect(case.mean(0))
    assert all(isinstance(p.grad, ShardedGrad) for p in case.params)


def test_gradients_left_by_no_sync_are_sent_at_step() -> None:
    run_ranks(no_sync_only, 2)


def sync_then_no_sync(rank: int, world_size: int) -> None:
    case = Case(rank, world_size)
    case.backward(0)
    case.backward(1, sync=False)
    case.expect(case.mean(0, 1))


def test_a_backward_without_sync_adds_to_what_was_reduced_before() -> None:
    run_ranks(sync_then_no_sync, 2)


def discard_then_backward(rank: int, world_size: int, how: str, who: str) -> None:
    case = Case(rank, world_size)
    case.backward(0)
    if who == "every rank" or rank == 0:
        if how == "p.grad = None":
            for param in case.params:
                param.grad = None
        elif how == "model.zero_grad()":
            case.model.zero_grad()
        elif how == "zero(None)":
            case.grads.zero(set_to_none=True)
        elif how == "zero(0)":
            case.grads.zero(set_to_none=False)
        else:
            case.model.zero_grad(set_to_none=False)
    case.backward(1)
    case.expect(case.mean(1))


@pytest.mark.parametrize("who", ["every rank", "rank 0"])
@pytest.mark.parametrize("how", ["p.grad = None", "model.zero_grad()", "zero(None)", "zero(0)", "model.zero_grad(0)"])
def test_a_gradient_discarded_between_backwards_is_gone_on_all_ranks(how: str, who: str) -> None:
    run_ranks(discard_then_backward, 2, how, who)


def discard_then_step(rank: int, world_size: int, who: str) -> None:
    case = Case(rank, world_size)
    case.backward(0)
    mean = case.mean(0)
    if who == "every rank" or rank == 1:
        for param in case.params[:2]:
            param.grad = None
        for param in case.params[2:4]:
            param.grad.zero_()
    case.expect([None, None, *(torch.zeros_like(g) for g in mean[2:4]), *mean[4:]])
    case.grads.zero(set_to_none=True)
    case.expect([None] * 6)


@pytest.mark.parametrize("who", ["every rank", "rank 1"])
def test_a_gradient_discarded_or_zeroed_before_step_is_absent_or_zero(who: str) -> None:
    run_ranks(discard_then_step, 2, who)


def discard_after_settling(rank: int, world_size: int) -> None:
    """As clip_grad_norm_, then a skipped step, then zero_grad: the reduced gradient had been reduced long before."""
    case = Case(rank, world_size)
    case.backward(0)
    case.ours.sync()
    case.model.zero_grad()
    case.expect([None] * 6)
    case.backward(1)
    case.expect(case.mean(1))


def test_a_gradient_discarded_after_it_reduced_is_gone() -> None:
    run_ranks(discard_after_settling, 2)


def zero_in_no_sync(rank: int, world_size: int) -> None:
    case = Case(rank, world_size)
    case.backward(0)
    case.backward(1, sync=False)
    case.model.zero_grad()
    case.backward(2, sync=False)
    case.backward(3)
    case.expect(case.mean(2, 3))


def test_a_gradient_discarded_inside_an_accumulation_is_gone() -> None:
    run_ranks(zero_in_no_sync, 2)


def assign_by_hand(rank: int, world_size: int, moment: str) -> None:
    case = Case(rank, world_size)
    by_hand = [torch.full_like(p, 10.0 * rank + index) for index, p in enumerate(case.params)]
    mean = mean_of([[torch.full_like(p, 10.0 * r + i) for i, p in enumerate(case.params)] for r in range(world_size)])
    if moment == "after a backward":
        case.backward(0)
    elif moment == "after a backward and one without sync":
        case.backward(0)
        case.backward(1, sync=False)
    for param, grad in zip(case.params, by_hand, strict=True):
        if moment == "after a backward and one without sync":
            param.grad = None  # frees a tensor whose place in memory the next one may get
            param.grad = grad.clone()
        else:
            param.grad = grad
    case.expect(mean)
    case.backward(2)
    case.expect([a + b for a, b in zip(mean, case.mean(2), strict=True)])


@pytest.mark.parametrize("moment", ["first", "after a backward", "after a backward and one without sync"])
def test_gradients_assigned_by_hand_are_what_step_uses(moment: str) -> None:
    run_ranks(assign_by_hand, 2, moment)


def assign_awkward_layouts(rank: int, world_size: int) -> None:
    case = Case(rank, world_size)
    weights = [p for p in case.params if p.dim() == 2]
    values = torch.arange(64.0 * 64).reshape(64, 64)
    weights[0].grad = values.t()
    weights[1].grad = torch.tensor(3.0).expand(64, 64)
    weights[2].grad = torch.cat([values, values])[::2]
    case.expect([values.t(), None, torch.full((64, 64), 3.0), None, torch.cat([values, values])[::2], None])


def test_gradients_assigned_by_hand_may_have_any_strides() -> None:
    run_ranks(assign_awkward_layouts, 2)


def assign_then_backward(rank: int, world_size: int) -> None:
    case = Case(rank, world_size)
    case.backward(0)
    for param in case.params:
        param.grad = torch.ones_like(param)
    case.backward(1)
    case.expect([grad + 1 for grad in case.mean(1)])


def test_a_backward_adds_to_gradients_assigned_by_hand() -> None:
    run_ranks(assign_then_backward, 2)


def zero_under_way(rank: int, world_size: int, stage: int) -> None:
    case = Case(rank, world_size, stage)
    case.ours.manager.flights.hold_back(True)
    case.backward(0)
    if stage == 2:
        assert (case.ours.manager.flights.num_launched, case.ours.manager.flights.num_reduced) == (3, 0)
    case.grads.zero(set_to_none=True)
    assert all(p.grad is None for p in case.params)
    case.ours.manager.flights.hold_back(False)
    case.backward(1)
    case.expect(case.mean(1))
    case.backward(2)
    case.grads.zero(set_to_none=True)
    case.expect([None] * 6)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_grad_discards_flights_under_way(stage: int) -> None:
    run_ranks(zero_under_way, 2, stage)


def zero_after_landing(rank: int, world_size: int) -> list[bool]:
    case = Case(rank, world_size)
    case.backward(0)
    case.ours.sync()
    held = [case.grads.shard(index) is not None for index in range(3)]
    case.grads.zero(set_to_none=True)
    return held + [case.grads.shard(index) is None and not case.grads.present(index).any() for index in range(3)]


def test_zero_grad_frees_the_shards_at_once() -> None:
    assert run_ranks(zero_after_landing, 2) == [[True] * 6] * 2


def whole_grads(rank: int, world_size: int) -> None:
    case = Case(rank, world_size, stage=1)
    case.backward(0)
    mean = case.mean(0)
    for param, grad in zip(case.params, mean, strict=True):
        torch.testing.assert_close(param.grad, grad)
    for param in case.params:  # what the user changes is what the step uses, on whichever rank owns it
        param.grad.mul_(0.5)
    case.params[0].grad = None
    case.params[1].grad = torch.ones_like(case.params[1])
    case.expect([None, torch.ones_like(mean[1]), *(0.5 * grad for grad in mean[2:])])


def test_stage_1_uses_what_stands_in_p_grad() -> None:
    run_ranks(whole_grads, 2)


def accumulate_with_optimizer(rank: int, world_size: int, stage: int) -> None:
    """Parameters after steps of two micro-batches each equal torch's with the mean gradient."""
    model, plain = Chain(3), Chain(3)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        with optimizer.no_sync():
            model(input_of(rank, 2 * step)).square().mean().backward()
        model(input_of(rank, 2 * step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for r in range(world_size):
            for micro in range(2):
                (plain(input_of(r, 2 * step + micro)).square().mean() / world_size).backward()
        reference.step()
        reference.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_training_with_accumulation_follows_adamw(stage: int) -> None:
    run_ranks(accumulate_with_optimizer, 2, stage)
