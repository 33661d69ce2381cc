"""Gradients that something else reduces too, or that autograd is not there to give: refused with the way out."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bucket_manager.rig import message_of, same_bits
from tests.bucket_manager.training import both_stages
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def wrapped_by_mistake(rank: int, world_size: int, stage: int, wrapped_first: bool) -> tuple[str, bool]:
    model = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(model) if wrapped_first else None
    optimizer = FusedShardedAdam((wrapped or model).named_parameters(), stage=stage)
    wrapped = wrapped or DistributedDataParallel(model)
    message = message_of(wrapped(torch.ones(2, 3)).sum().backward)
    del wrapped
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return message, same_bits(before, model.weight)


@both_stages
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_model_in_distributed_data_parallel_is_refused_at_the_first_backward(stage: int, wrapped_first: bool) -> None:
    for message, stuck in run_ranks(wrapped_by_mistake, 2, stage, wrapped_first):
        assert "is reduced twice, here and in a DistributedDataParallel or another zerox optimizer" in message
        assert "train the model without DistributedDataParallel" in message
        assert "bias'" in message or "weight'" in message
        assert not stuck, "without the wrapper it trains"


def only_evaluated(rank: int, world_size: int, stage: int) -> tuple[list[str], bool]:
    """Training the bare model beside a wrapper that evaluates, then beside one that trains, then without it."""
    model = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(model)
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    x = torch.full((2, 3), rank + 1.0)

    def train(forward: nn.Module) -> str:
        message = message_of(forward(x).sum().backward)
        if message == "no error":
            optimizer.step()
        optimizer.zero_grad()
        return message

    found = [train(model)]
    with torch.no_grad():
        wrapped(x)
    found.append(train(model))
    with wrapped.no_sync():
        found.append(train(wrapped))
    before = model.weight.detach().clone()
    found.append(train(model))
    trained = not same_bits(before, model.weight)
    second = DistributedDataParallel(model)
    found += [train(model), train(second)]
    return found, trained


@both_stages
def test_a_wrapper_that_only_evaluates_is_no_second_reducer(stage: int) -> None:
    for messages, trained in run_ranks(only_evaluated, 2, stage):
        assert messages[:5] == ["no error"] * 5
        assert "is reduced twice" in messages[5]
        assert trained


def two_optimizers(rank: int, world_size: int) -> list[str]:
    model = nn.Linear(3, 3)
    first = FusedShardedAdam(model.parameters())
    first = FusedShardedAdam(model.parameters())  # the one before is gone
    alone = message_of(lambda: (model(torch.ones(2, 3)).sum().backward(), first.step(), first.zero_grad()))
    second = FusedShardedAdam(model.parameters())
    return [alone, message_of(model(torch.ones(2, 3)).sum().backward), str(second is first)]


def test_two_living_optimizers_of_one_parameter_are_refused() -> None:
    for alone, both, _ in run_ranks(two_optimizers, 2):
        assert alone == "no error"
        assert "another zerox optimizer" in both


@both_stages
def test_hooks_of_the_user_s_are_no_second_reducer(stage: int) -> None:
    run_ranks(with_hooks_of_the_user, 2, stage)


def with_hooks_of_the_user(rank: int, world_size: int, stage: int) -> None:
    model = nn.Linear(3, 3)
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    seen = []
    accumulator = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_hook(lambda *_: seen.append("node"))
    model.bias.register_post_accumulate_grad_hook(lambda _: seen.append("param"))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert sorted(seen) == ["node", "param"]


def under_compiled_autograd(rank: int, world_size: int, stage: int) -> str:
    model = nn.Linear(3, 3)
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        message = message_of(model(torch.ones(2, 3)).sum().backward)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return message


@both_stages
def test_compiled_autograd_is_refused_in_one_line_with_the_way_out(stage: int) -> None:
    reason = "zerox does not work under compiled autograd: run backward() outside torch._dynamo.compiled_autograd"
    assert run_ranks(under_compiled_autograd, 2, stage) == [reason] * 2
