"""The most bytes of a step of two ranks on one GPU are zerox.estimate's within 2%, activations apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.allocator import Allocator, build
from tests.gpu.processes import run_processes
from tests.gpu.test_nccl import BACKEND, OF_TWO_RANKS, no_two_ranks, preloaded
from tests.gpu.twins import DEVICE
from zerox import FusedShardedAdam, MemoryBytes, estimate
from zerox._C import most_room_bytes

WIDTH = 1024 if DEVICE.type == "cuda" else 256
LAYERS = 96
LAYER_MB = WIDTH * WIDTH * 2 / 2**20
CAP_MB = 2 * LAYER_MB
ROWS = 8
WITHIN = 0.02
TIMEOUT_S = 90.0
MIB = 2**20
KINDS: dict[str, dict[str, Any]] = {"bf16": {}, "8 bits": {"state_dtype": "8bit"}}


class Deep(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Counter:
    """Bytes that tensors asked the device's allocator for; on the CPU also those of rooms, which are not its own."""

    def __init__(self, device: torch.device, library: Path) -> None:
        self.device = device
        self.allocator = Allocator(library) if device.type == "cpu" else None

    def now(self) -> int:
        if self.allocator is not None:
            return self.allocator.now
        return int(torch.cuda.memory_stats(self.device)["requested_bytes.all.current"])

    def peak_of(self, function: Any) -> int:
        if self.allocator is not None:
            most_room_bytes()
            return self.allocator.peak_of(function) + most_room_bytes()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"])


def backward(model: nn.Module, device: torch.device) -> None:
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    model(x).float().square().mean().backward()


def activations(counter: Counter) -> int:
    """What the same forward and backward take without an optimizer, beside parameters and gradients. The first brings
    the workspaces of the device's libraries."""
    backward(Deep(counter.device), counter.device)
    before = counter.now()
    model = Deep(counter.device)
    peak = counter.peak_of(lambda: backward(model, counter.device))
    return peak - before - 2 * sum(param.nbytes for param in model.parameters())


def measure(
    rank: int, world_size: int, name: str, backend: str, library: Path, options: dict[str, Any]
) -> tuple[int, MemoryBytes]:
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    counter = Counter(device, library)
    beside = activations(counter)
    base = counter.now()
    model = Deep(device)
    optimizer = FusedShardedAdam(model.named_parameters(), bucket_cap_mb=CAP_MB, **options)

    def step() -> None:
        backward(model, device)
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = max(counter.peak_of(step) for _ in range(3)) - base - max(0, beside)
    return peak, estimate(model.named_parameters(), world_size, backend=backend, bucket_cap_mb=CAP_MB, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_peak_of_a_step_is_the_estimate(device: torch.device, backend: str, stage: int, kind: str) -> None:
    if backend == "nccl" and BACKEND == "nccl" and (reason := no_two_ranks()):
        pytest.skip(reason)
    used = BACKEND if backend == "nccl" else "gloo"  # without a GPU gloo in both
    environment = {**OF_TWO_RANKS, **preloaded()} if used == "nccl" else {}
    options = {"stage": stage, **KINDS[kind]} | ({"resident_mb": 16 * LAYER_MB} if stage == 3 else {})
    library = build() if device.type == "cpu" else Path()
    arguments = (device.type, used, library, options)
    for peak, formula in run_processes(measure, 2, *arguments, backend=used, timeout_s=TIMEOUT_S, env=environment):
        told = f"{peak / MIB:.1f} MiB, and not {formula.typical_peak / MIB:.1f} to {formula.peak / MIB:.1f}"
        print(told)
        assert (1 - WITHIN) * formula.typical_peak <= peak <= (1 + WITHIN) * formula.peak, told
