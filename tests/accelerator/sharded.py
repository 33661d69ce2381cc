"""Trainings with sharded parameters on the fake accelerator, by ranks that are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.fake import expect_no_races, machine, on_stream, run_fake_ranks
from tests.kernels.shards import same_bits
from zerox import FusedShardedAdam, options
from zerox import engine as engine_module
from zerox.ranks.group import Ranks

HERE = threading.local()  # of the rank that this thread is
WIDTH, LAYERS = 32, 6
LAYER_BYTES = WIDTH * (WIDTH + 1) * 4
CAP_MB = LAYER_BYTES / 2**20  # a layer is a bucket
KINDS = ["native", "direct", "via host"]
LIMITS = {"released at once": None, "two buckets": 2 * 12 * 1024 / 2**20, "inf": float("inf")}
WAYS = {"devices": "auto", "host": "0"}  # by which a rank gets at its neighbours' shards: ZEROX_DEVICE_READS


def ranks_of_threads(monkeypatch: pytest.MonkeyPatch, way: str = "devices") -> Iterator[None]:
    """Inside, FusedShardedAdam takes the fake accelerator's tensors, and its ranks; at the end there was no race."""
    monkeypatch.setattr(engine_module, "find_ranks", lambda *_, **__: HERE.ranks)
    monkeypatch.setattr(options, "device_refusal", lambda _: None)
    monkeypatch.setattr(Ranks, "broadcast", lambda *_: None)  # which the backend has not: they are the same already
    monkeypatch.setitem(os.environ, "ZEROX_DEVICE_READS", WAYS[way])
    machine().take_races()
    yield
    for device in range(4):
        machine().set_busy_us(device, 0)
    expect_no_races()


class Chain(nn.Module):
    """Each layer twice, the second time in the other order, and on its own stream if one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(0)  # ranks are threads, and torch's own generator is the process's
        for param in self.parameters():
            nn.init.uniform_(param, -0.2, 0.2, generator)

    def forward(self, x: Tensor, side: int = 0) -> Tensor:
        index = x.device.index
        for layer in self.layers:
            x = torch.tanh(layer(x))
        machine().wait_stream(index, side, 0)
        with on_stream(side, index):
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
        machine().wait_stream(index, 0, side)
        return x


class Training:
    def __init__(self, ranks: Ranks, stage: int, limit: str = "inf", frozen: bool = False) -> None:
        HERE.ranks, self.ranks = ranks, ranks
        self.model = Chain().to(ranks.device)
        if frozen:
            for layer in self.model.layers[::2]:
                layer.requires_grad_(False)
        options = {"resident_mb": LIMITS[limit]} if stage == 3 else {}
        self.optimizer = FusedShardedAdam(
            self.model.named_parameters(), lr=0.01, stage=stage, bucket_cap_mb=CAP_MB, **options
        )
        self.inputs = self.batch(0)
        if stage == 3:
            self.residents = self.optimizer.inside.gather.residents
            self.residents.set_hostile(limit == "released at once")
            if limit == "released at once":
                self.residents.release_all()

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.ranks.rank)
        return torch.randn(4, WIDTH, generator=generator).to(self.ranks.device)

    def step(self, step: int, side: int = 0) -> list[str]:
        """What made the host wait for the device in forward and backward."""
        x = self.batch(step)
        machine().take_waits(self.ranks.device.index)
        self.model(x, side).square().sum().backward()
        waits: list[str] = machine().take_waits(self.ranks.device.index)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return waits

    def shards_bytes(self) -> int:
        return sum(each.buffer.own.nbytes for each in self.optimizer.inside.gather.all)

    def values(self) -> list[Tensor]:
        return [param.detach().cpu() for param in self.model.parameters()]


def stop_in_step(training: Any, all_here: threading.Barrier) -> None:
    """This rank stops in the midst of step() 1, and others go on."""

    def stop(*_: Any) -> None:
        all_here.wait()
        raise ZeroDivisionError

    training.optimizer._steps.update = stop
    with pytest.raises(ZeroDivisionError):
        training.step(1)


def assert_as_in_stage_2(world_size: int, kind: str, train: Callable[..., list[Tensor]], *args: object) -> None:
    """``train``: of ranks and a stage."""
    theirs = run_fake_ranks(train, world_size, kind, 2, *args)
    for rank, ours in enumerate(run_fake_ranks(train, world_size, kind, 3, *args)):
        same = [same_bits(one, other) for one, other in zip(ours, theirs[rank], strict=True)]
        assert all(same), (rank, same)
