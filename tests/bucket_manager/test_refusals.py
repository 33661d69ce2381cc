"""What is refused on the spot: a step inside no_sync(), sparse gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.bucket_manager.rig import message_of
from tests.bucket_manager.training import Training, both_stages
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def step_inside_no_sync(rank: int, _: int, stage: int) -> tuple[str, bool, str]:
    training = Training(rank, stage)
    before = training.snapshot()
    with training.optimizer.no_sync():
        training.backward(0)
        message = message_of(training.optimizer.step)
    untouched = training.is_as(before)
    training.backward(1)
    return message, untouched, message_of(training.optimizer.step)


@both_stages
def test_step_inside_no_sync_raises(stage: int) -> None:
    for message, untouched, after in run_ranks(step_inside_no_sync, 2, stage):
        assert "step()" in message
        assert "no_sync()" in message
        assert untouched
        assert after == "no error"


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 4)


def sparse_gradient(rank: int, _: int, stage: int) -> tuple[str, str, str]:
    torch.manual_seed(0)
    model = Lookup()
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    tokens = torch.tensor([1, 2, 2])
    first = message_of(model.head(model.table(tokens)).sum().backward)
    step = message_of(optimizer.step)
    optimizer.zero_grad()
    model.table.sparse = False
    model.head(model.table(tokens)).sum().backward()
    return first, step, message_of(optimizer.step)


@both_stages
def test_a_sparse_gradient_raises_naming_the_parameter(stage: int) -> None:
    for first, step, after in run_ranks(sparse_gradient, 2, stage):
        assert "sparse" in first
        assert "'table.weight'" in first
        assert "zero_grad" in step
        assert after == "no error"


def only_a_sparse_gradient(rank: int, _: int) -> tuple[str, str]:
    """Nothing else was ready before: the exception comes before any gradient was seen."""
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = FusedShardedAdam([("table.weight", table.weight)])
    message_of(table(torch.tensor([1])).sum().backward)
    step = message_of(optimizer.step)
    optimizer.zero_grad()
    return step, message_of(optimizer.step)


def test_a_sparse_gradient_left_in_p_grad_is_refused_by_step_too() -> None:
    for step, after in run_ranks(only_a_sparse_gradient, 2):
        assert "sparse" in step
        assert "'table.weight'" in step
        assert after == "no error"


def sparse_on_rank_1(rank: int, _: int, stage: int, by_hand: bool) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model = Lookup()
    model.table.sparse = rank == 1 and not by_hand
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    before = [p.detach().clone() for p in model.parameters()]
    tokens = torch.tensor([1, 2, 2])
    calls = [lambda: model.head(model.table(tokens)).sum().backward(), optimizer.step]
    if by_hand:
        del calls[0]
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if rank == 1:
            model.table.weight.grad = torch.ones(10, 4).to_sparse()
    messages = []
    for call in calls:
        messages.append(message_of(call))
        if rank == 0 and messages[-1] != "no error":
            break  # in stage 1 it meets rank 1's step() at the end of its backward
    untouched = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    model.table.sparse = False
    model.head(model.table(tokens)).sum().backward()
    optimizer.step()
    return messages, untouched


@both_stages
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_sparse_gradient_on_one_rank_raises_on_all_and_changes_nothing(stage: int, by_hand: bool) -> None:
    for rank, (messages, untouched) in enumerate(run_ranks(sparse_on_rank_1, 2, stage, by_hand)):
        assert "rank 1 can't go on" in messages[-1], messages
        if rank == 1:
            assert "parameter 'table.weight' got a sparse gradient" in messages[0]
            assert "sparse=False" in messages[0]
        assert untouched
