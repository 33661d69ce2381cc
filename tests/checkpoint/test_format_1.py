"""A checkpoint of format 1, as zerox 0.1.0 wrote it on two ranks, loads for good.

``python -m tests.checkpoint.test_format_1`` made the folder ``format_1``; it is not to be made again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load, save
from zerox.checkpoint import manifest

FOLDER = Path(__file__).with_name("format_1")
EXTRA = {"step": 3, "sampler": torch.arange(4), "notes": ["a", None, 1.5]}


def build(seed: int) -> tuple[nn.Module, FusedShardedAdam]:
    """Moments in 8 bits and in fp32, remainders, two groups, and a frozen parameter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 66), nn.BatchNorm1d(66), nn.Linear(66, 3)).to(torch.bfloat16)
    model[2].bias.requires_grad_(False)
    named = dict(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named.items() if "weight" in name], "weight_decay": 0.3},
        {"params": [(name, p) for name, p in named.items() if "bias" in name], "lr": 0.02, "amsgrad": True},
    ]
    return model, FusedShardedAdam(groups, lr=0.01, state_dtype="8bit", bucket_cap_mb=0.01)


def make(rank: int, _: int) -> None:
    model, optimizer = build(0)
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.broadcast_buffers(model)
    save(FOLDER / "checkpoint", model, optimizer, extra=EXTRA)
    expected = whole(model, optimizer)
    if rank == 0:
        torch.save(expected, FOLDER / "expected.pt")


def whole(model: nn.Module, optimizer: FusedShardedAdam) -> dict[str, Any]:
    return {"model": model.state_dict(), **optimizer.full_state_dict()}


def load_it(rank: int, world_size: int) -> dict[str, Any]:
    model, optimizer = build(1)
    extra = load(FOLDER / "checkpoint", model, optimizer)
    assert extra["sampler"].tolist() == EXTRA["sampler"].tolist()
    assert {key: extra[key] for key in ("step", "notes")} == {key: EXTRA[key] for key in ("step", "notes")}
    return whole(model, optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_format_1_loads(world_size: int) -> None:
    expected = torch.load(FOLDER / "expected.pt", weights_only=True)
    found = run_ranks(load_it, world_size)[0]
    for name, tensor in expected["model"].items():
        assert same_bits(found["model"][name], tensor), name
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for what, tensor in state.items():
            assert same_bits(found["state"][number][what], tensor), (number, what)
    assert found["param_groups"] == expected["param_groups"]


def test_it_is_of_format_1() -> None:
    assert manifest.read(FOLDER / "checkpoint")["format"] == 1


if __name__ == "__main__":
    if FOLDER.exists():
        sys.exit(f"{FOLDER} is there, and what it has must stay readable")
    FOLDER.mkdir()
    run_ranks(make, 2)
