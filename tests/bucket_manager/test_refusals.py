"""What is refused on the spot: a step inside no_sync(), sparse gradients."""

from __future__ import annotations

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
