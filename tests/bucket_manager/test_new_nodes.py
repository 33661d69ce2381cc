"""torch drops a parameter's AccumulateGrad node where it gets another dtype: its gradients are averaged all the same.

The twin moves its parameters to new memory with the same rounded values, without another dtype on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import Chain, input_of, message_of, same_bits
from tests.bucket_manager.training import both_stages
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

all_stages = pytest.mark.parametrize("stage", [1, 2, 3])


def converts(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    (model.half() if dtype is torch.float32 else model.float()).to(dtype)


def moves(model: nn.Module) -> None:
    for param in model.parameters():
        whole = [param.grad] if type(param.grad) is Tensor else []
        for tensor in (param, *whole):
            tensor.data = tensor.data.half().float() if param.dtype is torch.float32 else tensor.data.clone()


CHANGES: dict[str, Callable[[nn.Module], None]] = {"dtype": converts, "storage": moves}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 and fp32": {"dtype": torch.bfloat16, "master_weights": "fp32"},
    "summed in fp32": {"dtype": torch.bfloat16, "accumulate_dtype": torch.float32},
    "divided by 3": {"gradient_divisor": 3.0},
}


class Changed:
    """Parameters change on some ranks before the backwards of step 1 and, with gradients in place, of step 2."""

    def __init__(self, rank: int, stage: int, change: str, who: str, kind: str) -> None:
        options = dict(KINDS[kind])
        self.model = Chain(3).to(options.pop("dtype", torch.float32))
        self.optimizer = FusedShardedAdam(self.model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.02, **options)
        self.rank, self.changes = rank, who == "all" or rank == 0
        self.change = CHANGES[change]

    def run(self) -> list[Tensor]:
        found = []
        flights, num_buckets = self.optimizer.inside.manager.flights, len(self.optimizer.inside.buckets)
        for step in range(4):
            if self.changes and step in (1, 2):
                self.change(self.model)
            for part in range(2):
                launched = flights.num_launched
                self.backward(2 * step + part)
                assert flights.num_launched - launched == num_buckets, "not sent during backward"
                if type(grad := next(self.model.parameters()).grad) is Tensor:
                    found.append(grad.clone())
                assert grad is not None
                assert grad.dtype is self.optimizer.inside.buckets[0].grad_dtype
            found.append(self.optimizer.clip_grad_norm_(0.5))
            self.optimizer.step()
            if step != 1:
                self.optimizer.zero_grad()
        with self.optimizer.whole():
            return found + [param.detach().clone() for param in self.model.parameters()]

    def backward(self, seed: int) -> None:
        x = input_of(self.rank, seed).to(next(self.model.parameters()).dtype)
        self.model(x).square().mean().backward()


def trained_both_ways(rank: int, _: int, stage: int, who: str, kind: str) -> list[Tensor]:
    ours, twins = (Changed(rank, stage, change, who, kind).run() for change in CHANGES)
    for one, other in zip(ours, twins, strict=True):
        assert same_bits(one, other)
    return ours


@all_stages
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_gradients_are_averaged_after_a_round_trip_through_another_dtype(stage: int, who: str) -> None:
    one, other = run_ranks(trained_both_ways, 2, stage, who, "fp32")
    for found, on_rank_1 in zip(one, other, strict=True):
        assert same_bits(found, on_rank_1)


@all_stages
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp32"])
def test_with_every_kind_of_gradient(stage: int, kind: str) -> None:
    run_ranks(trained_both_ways, 2, stage, "all", kind)


def between_forward_and_backward(rank: int, _: int, stage: int) -> None:
    """This backward goes through the old nodes, the next one through new ones."""
    found = []
    for change in (None, converts):
        model = Chain(3)
        for param in model.parameters():
            param.data = param.data.half().float()
        optimizer = FusedShardedAdam(model.parameters(), lr=0.0, stage=stage)
        losses = [model(input_of(rank, 0)).square().mean()]
        if change is not None:
            change(model)
        losses.append(model(input_of(rank, 1)).square().mean())
        for loss in losses:
            loss.backward()
        found.append(optimizer.clip_grad_norm_(1e9))
        assert optimizer.inside.manager.flights.num_launched == 2 * len(optimizer.inside.buckets)
    assert same_bits(*found)


@both_stages
def test_old_nodes_and_new_ones_are_seen(stage: int) -> None:
    run_ranks(between_forward_and_backward, 2, stage)


def hooks_of_the_user_s(rank: int, _: int, stage: int) -> None:
    """The first register_hook() of a parameter takes away what watches it: it is put back."""
    model = Chain(3)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage)
    seen: list[int] = []
    step = 0

    def note(_: Tensor) -> None:
        seen.append(step)

    for step in range(3):
        if step == 1:
            for param in model.parameters():
                param.register_hook(note)
            optimizer.zero_grad()
        if step == 2 and rank == 0:
            converts(model)
        launched = optimizer.inside.manager.flights.num_launched
        model(input_of(rank, step)).square().mean().backward()
        assert optimizer.inside.manager.flights.num_launched > launched
        optimizer.step()
    assert seen == [1] * 6 + [2] * 6
    del optimizer
    for param in model.parameters():
        param.grad = None
    model(input_of(rank, 3)).square().mean().backward()
    assert len(seen) == 18, "the user's own hooks stay"


@both_stages
def test_a_user_s_first_hook_does_not_end_it(stage: int) -> None:
    run_ranks(hooks_of_the_user_s, 2, stage)


def unseen(rank: int, _: int, stage: int, who: str) -> tuple[str, bool]:
    """Nothing meets between the first hook of the user's and the other dtype."""
    model = Chain(3).bfloat16().half().float()  # so that values stay, which ranks compare in the first step
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    if who == "all" or rank == 0:
        for param in model.parameters():
            param.register_hook(lambda grad: grad)
        converts(model)
    before = [param.detach().clone() for param in model.parameters()]
    messages = []

    def train(step: int) -> None:
        model(input_of(rank, step)).square().mean().backward()
        optimizer.step()

    messages.append(message_of(lambda: train(0)))
    stayed = all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    messages.append(message_of(lambda: train(1)))
    assert messages[1] == "no error"
    return messages[0], stayed


@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_whole_gradients_that_no_hook_saw_are_refused_by_name_on_all_ranks(who: str) -> None:
    for message, stayed in run_ranks(unseen, 2, 1, who):
        assert re.match(r"zerox: rank [01] can't go on: parameter 'layers\.", message), message
        assert "register_hook()" in message
        assert stayed


@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_sharded_gradients_that_no_hook_saw_are_sent_by_step(who: str) -> None:
    for message, stayed in run_ranks(unseen, 2, 2, who):
        assert message == "no error"
        assert not stayed


def asked_for_a_gradient(rank: int, _: int) -> None:
    """torch.autograd.grad() calls a parameter's own hooks too, and accumulates nothing."""
    model = Chain(2)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=1)
    converts(model)
    torch.autograd.grad(model(input_of(rank, 0)).sum(), list(model.parameters()))
    assert optimizer.inside.manager.flights.num_launched == 0
    model(input_of(rank, 1)).square().mean().backward()
    assert optimizer.inside.manager.flights.num_launched == len(optimizer.inside.buckets)


def test_a_gradient_that_is_asked_for_is_not_sent() -> None:
    run_ranks(asked_for_a_gradient, 2)
