"""overlap_gather() on an accelerator: streams wait for what they read, and for nothing that is still on its way."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.fake import expect_no_races, machine, on_stream, run_fake_ranks
from tests.accelerator.test_streams import CAP, NUMEL
from tests.kernels.shards import same_bits
from zerox import engine as engine_module
from zerox.optimizers import FusedShardedAdam
from zerox.ranks.group import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
STEPS = 4


class Scale(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Crossed(nn.Module):
    """Runs its modules backwards, and reads the first one's parameter before anything runs that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scale(seed) for seed in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.parts[2].weight  # type: ignore[operator]
        for part in reversed(self.parts):
            x = part(x)
        return x


def trained(ranks: Ranks, overlap: bool, other_stream: bool) -> tuple[list[Tensor], int]:
    """Parameters after some steps, forwards on the stream of the step or on another one that waits for it."""
    model = Crossed().to(ranks.device)
    optimizer = FusedShardedAdam(model.parameters(), lr=0.1, bucket_cap_mb=CAP / 2**20)
    if overlap:
        optimizer.overlap_gather(model)
    left = 0
    index = ranks.device.index
    side = machine().new_stream(index) if other_stream else 0
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((NUMEL,), 1.0 + ranks.rank + step, device=ranks.device)
        if other_stream:
            machine().wait_stream(index, side, 0)  # for the step, not for what the next line waits for
            with torch.no_grad():
                model(x)
            with on_stream(side, index):
                model(x).detach().sum()
            machine().wait_stream(index, 0, side)
        model(x).square().mean().backward()
        optimizer.step()
        left += len(optimizer.inside.manager.params.missing)
    optimizer.synchronize()
    return [p.detach().cpu() for p in model.parameters()], left


@pytest.mark.parametrize("other_stream", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize(("world_size", "kind"), [(2, "native"), (3, "direct"), (2, "via host")])
def test_training_is_that_without_overlap_and_no_stream_reads_too_early(
    monkeypatch: pytest.MonkeyPatch, world_size: int, kind: str, other_stream: bool
) -> None:
    here = threading.local()
    monkeypatch.setattr(engine_module, "find_ranks", lambda *_, **__: here.ranks)
    monkeypatch.setattr(engine_module, "check_params", lambda *_, **__: None)
    monkeypatch.setattr(
        Ranks, "broadcast", lambda *_, **__: None
    )  # which the backend has not: they are the same already
    machine().take_races()

    def train(ranks: Ranks, overlap: bool) -> tuple[list[Tensor], int]:
        here.ranks = ranks
        return trained(ranks, overlap, other_stream)

    hidden = run_fake_ranks(train, world_size, kind, True)
    plain = run_fake_ranks(train, world_size, kind, False)
    expect_no_races()
    for (params, left), (expected, none_left) in zip(hidden, plain, strict=True):
        assert all(map(same_bits, params, expected))
        assert none_left == 0
        assert left >= STEPS - 1
