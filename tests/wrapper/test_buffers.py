"""Forwards hand out rank 0's buffers when torch's do."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.ranks import run_ranks
from zerox import DistributedDataParallel, FusedShardedAdam

TRAIN, EVALUATE, KEEP = "train", "evaluate", "inside no_sync()"


class Counting(nn.Module):
    """Its buffers have each rank's own number of forwards, and what rank 0 had when they were handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1 + 10 * dist.get_rank()
        self.phase = self.phase + 1j * (1 + dist.get_rank())  # another tensor each time
        self.flag[0] = dist.get_rank() == 0
        found: Tensor = self.layer(x)
        return found


def counts(model: Any, calls: list[str]) -> list[tuple[int, complex, bool]]:
    """After each of these calls."""
    found = []
    x = torch.ones(2, 4)
    for call in calls:
        if call == TRAIN:
            model(x).sum().backward()
        elif call == KEEP:
            with model.no_sync():
                model(x).sum().backward()
        else:
            with torch.no_grad():
                model(x)
        inner = model.module
        found.append((int(inner.count), complex(inner.phase[0]), bool(inner.flag[0])))
    return found


def in_all_mixtures(rank: int, world_size: int) -> list[bool]:
    order = random.Random(0)
    found = []
    for number in range(12):
        calls = [order.choice([TRAIN, EVALUATE, KEEP]) for _ in range(8)] if number else [TRAIN, TRAIN, KEEP, TRAIN]
        theirs = counts(OfTorch(Counting()), calls)
        model = DistributedDataParallel(Counting())
        optimizer = FusedShardedAdam(model.parameters())
        found.append(counts(model, calls) == theirs)
        del optimizer
        found.append(counts(DistributedDataParallel(Counting()), calls) == theirs)  # gradients that are left over
    return found


def test_they_are_handed_out_when_torch_does() -> None:
    assert all(map(all, run_ranks(in_all_mixtures, 2)))


def messages(rank: int, world_size: int) -> tuple[int, int]:
    model = DistributedDataParallel(Counting())
    sent: list[int] = []
    broadcast = dist.broadcast

    def counted(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(values.numel())
        return broadcast(values, *args, **kwargs)

    dist.broadcast = counted
    try:
        with torch.no_grad():
            model(torch.ones(2, 4))
            once = len(sent)
            model(torch.ones(2, 4))
    finally:
        dist.broadcast = broadcast
    return once, len(sent)


def test_one_message_for_all_dtypes_and_none_for_the_next_evaluation() -> None:
    assert run_ranks(messages, 2) == [(1, 1)] * 2


def by_the_flags(rank: int, world_size: int) -> list[int]:
    found = []
    for way in ("argument", "older name", "attribute", "param sync"):
        options = {"argument": {"forward_sync_buffers": False}, "older name": {"broadcast_buffers": False}}.get(way, {})
        model = DistributedDataParallel(Counting(), **options)
        if way == "attribute":
            model.broadcast_buffers = False
            assert not model.forward_sync_buffers
        if way == "param sync":
            model.require_forward_param_sync = False
        assert not model.will_sync_module_buffers()
        model(torch.ones(2, 4))
        found.append(int(model.module.count))
    return found


def test_not_where_it_was_turned_off() -> None:
    assert run_ranks(by_the_flags, 2) == [[1] * 4, [11] * 4]


class Scaled(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def saved_for_backward(rank: int, world_size: int) -> bool:
    """A buffer that autograd has saved is handed out again before its backward."""
    model = DistributedDataParallel(Scaled())
    x = torch.ones(2, 4, requires_grad=True)
    (model(x) + model(x)).sum().backward()
    return x.grad is not None


def test_a_buffer_may_be_handed_out_between_forward_and_backward() -> None:
    assert all(run_ranks(saved_for_backward, 2))


def alone(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(Counting())
    if rank == 1:
        try:
            model(torch.ones(2, 4))
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_calls_forward_alone_is_told_the_way_out() -> None:
    said = run_ranks(alone, 2, timeout_s=3)[1]
    assert "ddp.module(x)" in said
    assert "Counting" in said


def conjugates(rank: int, world_size: int) -> list[bool]:
    model = nn.Linear(2, 2)
    model.register_buffer("turned", (torch.ones(3, dtype=torch.complex64) * (1 + rank) * 1j).conj())
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 2))
    return [bool((ddp.module.turned == -1j).all())]


def test_buffers_that_are_conjugate_views_are_handed_out() -> None:
    assert run_ranks(conjugates, 2) == [[True]] * 2
