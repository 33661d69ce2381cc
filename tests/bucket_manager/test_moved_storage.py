"""A parameter that no longer is what the optimizer was built for: an error on all ranks, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import WIDTH, message_of
from tests.bucket_manager.training import Training, both_stages
from tests.ranks import run_ranks

# What rank 1 does to the weight of a layer, and what is then named.
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dtype": (lambda t: t.double(), f"({WIDTH}, {WIDTH}) of torch.float64 on cpu"),
    "shape": (lambda t: t[:2].clone(), f"(2, {WIDTH}) of torch.float32 on cpu"),
}
BUILT = f"but was ({WIDTH}, {WIDTH}) of torch.float32 on cpu"


def change_on_rank_1(rank: int, _: int, stage: int, what: str) -> tuple[list[str], bool]:
    training = Training(rank, stage)
    training.backward(0)
    training.optimizer.step()
    training.optimizer.zero_grad()
    before = training.snapshot()
    weight = training.model.layers[1].weight
    kept = weight.data
    training.backward(1)
    if rank == 1:
        weight.data = CHANGES[what][0](weight.data)
    messages = [message_of(lambda: training.optimizer.clip_grad_norm_(1.0)), message_of(training.optimizer.step)]
    weight.data = kept
    untouched = training.is_as(before)
    training.optimizer.zero_grad()
    training.backward(2)
    training.optimizer.step()
    return messages, untouched


@both_stages
@pytest.mark.parametrize("what", CHANGES)
def test_a_parameter_that_no_longer_fits_raises_on_all_ranks_and_changes_nothing(stage: int, what: str) -> None:
    for rank, (messages, untouched) in enumerate(run_ranks(change_on_rank_1, 2, stage, what)):
        for message in messages:
            assert message.startswith("zerox: rank 1 can't go on: "), message
            if rank == 1:
                assert "parameter 'layers.1.weight' is " in message
                assert CHANGES[what][1] in message
                assert BUILT in message
        assert untouched


def gradient_of_another_size_by_hand(rank: int, _: int, stage: int) -> tuple[str, bool]:
    training = Training(rank, stage)
    before = training.snapshot()
    weight = training.model.layers[1].weight
    kept = weight.data
    if rank == 1:
        weight.data = weight.data[:2]
    for param in training.model.parameters():
        param.grad = torch.ones_like(param)
    weight.data = kept
    message = message_of(training.optimizer.step)
    return message, training.is_as(before)


@both_stages
def test_a_gradient_of_another_size_is_never_packed(stage: int) -> None:
    """It would be read past its end."""
    for rank, (message, untouched) in enumerate(run_ranks(gradient_of_another_size_by_hand, 2, stage)):
        assert message.startswith("zerox: rank 1 can't go on: "), message
        assert untouched
        if rank == 1:
            assert "parameter 'layers.1.weight' got a gradient of [2, 64] on cpu, but was [64, 64] on cpu" in message
