"""torch.nn.DataParallel, which is a plain call without GPUs or with one, and with several trains copies in threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam

STEPS = 4


def make(kind: str, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 1))
    wrapped = nn.DataParallel(model)
    if kind == "zerox":
        return wrapped, FusedShardedAdam(wrapped.named_parameters(), lr=0.01, stage=stage)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01, foreach=False)


def copies(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """As torch's own, which knows GPUs only: copies through which gradients come back."""
    return [[tensor.clone() for tensor in tensors] for _ in devices]


def forward_of_copies(wrapped: nn.DataParallel, x: Tensor) -> Tensor:
    module = sys.modules["torch.nn.parallel.replicate"]
    with mock.patch.object(module, "_broadcast_coalesced_reshape", copies):
        replicas = nn.parallel.replicate(wrapped.module, [0, 1])
    results: list[Any] = [None, None]

    def run(index: int, part: Tensor) -> None:
        results[index] = replicas[index](part)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(x.chunk(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(results)


def train(rank: int, world_size: int, kind: str, stage: int, of_copies: bool) -> list[Tensor]:
    wrapped, optimizer = make(kind, stage)
    assert isinstance(wrapped, nn.DataParallel)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator)
        out = forward_of_copies(wrapped, x) if of_copies else wrapped(x)
        out.square().mean().backward()
        if kind != "zerox" and world_size > 1:
            for param in wrapped.parameters():
                torch.distributed.all_reduce(param.grad)
                param.grad.div_(world_size)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in wrapped.parameters()]


@pytest.mark.parametrize(("world_size", "of_copies"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_trains_as_with_adamw(stage: int, world_size: int, of_copies: bool) -> None:
    ours, theirs = (run_ranks(train, world_size, kind, stage, of_copies) for kind in ("zerox", "torch"))
    for own, other in zip(ours, theirs, strict=True):
        for one, two in zip(own, other, strict=True):
            assert torch.allclose(one, two, rtol=0, atol=2e-7)
    with torch.no_grad():
        begin = list(make("torch", 1)[0].parameters())
        assert any(float((a - b).abs().max()) > 1e-3 for a, b in zip(ours[0], begin, strict=True))
