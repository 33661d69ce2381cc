"""A rank saves alone what lies on other ranks' devices: Note [State is pulled]."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.fake import expect_no_races, machine, run_fake_ranks
from tests.accelerator.sharded import HERE, ranks_of_threads
from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS
from tests.ranks import TIMEOUT_S
from zerox import FusedShardedAdam
from zerox.ranks.group import Ranks
from zerox.state.pulled_tensor import PulledTensor

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
WIDTH = 48
KINDS_HERE = ["fp32", "fp32, bf16 moments", "bf16 remainder", "amsgrad, 8-bit moments"]


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from ranks_of_threads(monkeypatch)


def made(ranks: Ranks, stage: int, kind: str) -> tuple[nn.Module, FusedShardedAdam]:
    HERE.ranks = ranks
    dtype, options = KINDS[kind]
    generator = torch.Generator().manual_seed(0)  # ranks are threads, and torch's own is the process's
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for param in model.parameters():
        nn.init.uniform_(param, -0.2, 0.2, generator)
    model = model.to(ranks.device, dtype)
    return model, FusedShardedAdam(model.parameters(), lr=0.1, stage=stage, bucket_cap_mb=0.01, **options)


def step(ranks: Ranks, model: nn.Module, optimizer: FusedShardedAdam, number: int) -> None:
    x = torch.full((4, WIDTH), 1.0 + ranks.rank + number, device=ranks.device, dtype=next(model.parameters()).dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(optimizer: FusedShardedAdam) -> dict[int, dict[str, Tensor]]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    found: dict[int, dict[str, Tensor]] = torch.load(file, weights_only=True)["state"]
    return found


def saves_alone(ranks: Ranks, stage: int, kind: str, together: threading.Barrier) -> Any:
    """Each rank in turn, while devices are busy and the others wait."""
    model, optimizer = made(ranks, stage, kind)
    machine().set_busy_us(ranks.device.index, 200)
    for number in range(2):
        step(ranks, model, optimizer, number)
    for each in range(ranks.size):
        if ranks.rank == each:
            found = saved(optimizer)
            shown = optimizer.state_dict()["state"][0]["exp_avg"]
            assert isinstance(shown, PulledTensor)
            assert shown.device == ranks.device
            whole = shown + 0
            assert whole.device == ranks.device
        together.wait()
        machine().hear()  # its own server's thread, which has answered
    machine().set_busy_us(ranks.device.index, 0)
    return found, whole.cpu(), own_parts(optimizer)


Parts = dict[int, dict[str, tuple[int, Tensor]]]  # by parameter and key: where a rank's own values begin, and these


def own_parts(optimizer: FusedShardedAdam) -> Parts:
    shown = optimizer.state_dict()["state"]
    return {
        number: {key: (value.span.start, value.own.cpu()) for key, value in state.items()}
        for number, state in shown.items()
    }


@pytest.mark.parametrize("kind", KINDS_HERE)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["native", "via host"])
def test_a_rank_saves_the_whole_state_alone(exchange: str, stage: int, kind: str) -> None:
    together = threading.Barrier(2, timeout=TIMEOUT_S)
    results = run_fake_ranks(saves_alone, 2, exchange, stage, kind, together, are_asked=True)
    expect_no_races()
    for found, whole, _ in results:
        assert same_bits(whole, found[0]["exp_avg"])
        for number, state in found.items():
            for key, value in state.items():
                assert value.device.type == "cpu"
                parts = [each[number][key] for _, _, each in results]
                flat, is_known = value.reshape(-1), torch.zeros(value.numel(), dtype=torch.bool)
                for start, own in parts:
                    assert same_bits(flat[start : start + own.numel()], own.reshape(-1)), (number, key)
                    is_known[start : start + own.numel()] = True
                assert is_known.all(), (number, key)
