"""The most bytes of a step on an accelerator, by the allocator's counts, are zerox.estimate's within 2%."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.accelerator.fake import machine, run_fake_ranks
from tests.accelerator.sharded import HERE, KINDS, ranks_of_threads
from zerox import FusedShardedAdam, MemoryBytes
from zerox.ranks.group import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
WIDTH, LAYERS = 256, 48
LAYER_BYTES = WIDTH * WIDTH * 4
WITHIN = 0.02
BEHIND_S = 0.01  # a layer


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield from ranks_of_threads(monkeypatch)
    gc.enable()


class Deep(nn.Module):
    """Activations of one row: next to nothing beside a layer's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((WIDTH, WIDTH), 1 / WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + x @ weight
        return x


def peak(ranks: Ranks, stage: int, options: dict[str, Any], is_late: threading.Barrier) -> tuple[int, MemoryBytes]:
    """Of a step, without activations; and the estimate. Rank 1's backward is slower, so that the wire is for rank 0."""
    HERE.ranks, index = ranks, ranks.device.index
    machine().take_most_bytes(index)
    base = machine().take_most_bytes(index)
    model = Deep().to(ranks.device)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage, **options)

    def step(is_slow: bool) -> None:
        hooks = []
        if is_slow:
            hooks = [p.register_post_accumulate_grad_hook(lambda _: time.sleep(BEHIND_S)) for p in model.parameters()]
        model(torch.ones(1, WIDTH, device=ranks.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()

    step(is_slow=False)
    is_late.wait()
    machine().take_most_bytes(index)
    step(is_slow=ranks.rank == 1)
    most = machine().take_most_bytes(index) - base
    is_late.wait()
    return most, zerox.estimate(model.named_parameters(), ranks.size, backend=ranks.backend, stage=stage, **options)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "direct"])
def test_the_peak_of_a_step_is_the_estimate(kind: str, stage: int) -> None:
    options = {"bucket_cap_mb": LAYER_BYTES / 2**20} | ({"resident_mb": 4 * LAYER_BYTES / 2**20} if stage == 3 else {})
    (most, formula), _ = run_fake_ranks(peak, 2, kind, stage, options, threading.Barrier(2))
    found, typical, bound = (each / LAYER_BYTES for each in (most, formula.typical_peak, formula.peak))
    told = f"{found:.2f} layers, and not {typical:.2f} to {bound:.2f}"
    print(told)
    assert (1 - WITHIN) * formula.typical_peak <= most <= (1 + WITHIN) * formula.peak, told
