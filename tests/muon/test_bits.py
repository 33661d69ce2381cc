"""Muon by owners has the bits of torch.optim.Muon, which steps on the same mean gradients, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.muon.rig import OF_ADAM, OPTIONS, Model, Twin, build, train
from tests.ranks import run_ranks
from tests.whole.rig import unequal_buckets

PLAIN: dict[str, Any] = {}


def follow(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    by_rule: bool,
    steps: int,
    device: str = "cpu",
) -> None:
    for stage in (1, 2, 3):
        model = Model(dtype).to(device)
        twin = Twin(model, {**OPTIONS, **options})
        optimizer = build(model, by_rule, {**OPTIONS, **options}, stage=stage)
        assert world_size == 1 or unequal_buckets(optimizer) > 0
        train(rank, world_size, model, twin, optimizer, range(steps), clip=1.0)
        state = optimizer.full_state_dict().get("state", {})
        numbers = {
            name: number for number, name in enumerate(name for g in optimizer.param_groups for name in names(g))
        }
        for name, number in numbers.items() if rank == 0 else ():
            if name not in OF_ADAM:
                ours = state[number]["momentum_buffer"]
                assert torch.equal(ours.reshape(-1, ours.shape[-1]).cpu(), twin.state(name).cpu()), name


def names(group: dict[str, Any]) -> list[str]:
    found: list[str] = group["param_names"]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_twenty_clipped_steps_are_torchs(world_size: int) -> None:
    run_ranks(follow, world_size, PLAIN, torch.float32, False, 20)


OTHERS: dict[str, dict[str, Any]] = {
    "no nesterov": {"nesterov": False},
    "no momentum": {"momentum": 0.0},
    "another rate": {"adjust_lr_fn": "match_rms_adamw", "lr": 0.01},
    "other iterations": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_options_are_torchs(options: dict[str, Any]) -> None:
    run_ranks(follow, 2, options, torch.float32, True, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_parameters_are_those_of_their_masters(dtype: torch.dtype) -> None:
    """A float64 parameter has none."""
    run_ranks(masters, 2, dtype)


def masters(rank: int, world_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    for stage, kind in ((2, "fp32"), (3, "fp32"), (1, "auto")):
        model = Model(dtype).to(device)
        twin = Twin(model, OPTIONS, half_away=kind == "auto" and dtype is torch.bfloat16)
        optimizer = build(model, False, OPTIONS, stage=stage, master_weights=kind)
        train(rank, world_size, model, twin, optimizer, range(4))
