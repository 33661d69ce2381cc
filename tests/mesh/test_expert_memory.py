"""Bytes of a rank with experts, by formula and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zerox
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def weighed(rank: int, world_size: int, stage: int, size: int, dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """Lasting bytes of one rank, counted and by formula, with gradients and without."""
    mesh = init_device_mesh("cpu", (size, world_size // size), mesh_dim_names=("edp", "ep"))
    dense = [torch.nn.Parameter(torch.randn(700, 40, dtype=dtype)) for _ in range(2)]
    experts = [torch.nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in ((333, 50), (900, 700), (7,))]
    optimizer = FusedShardedAdam(
        [{"params": dense}, {"params": experts, "process_group": mesh["edp"] if size > 1 else "alone"}], stage=stage
    )
    for group in (size, mesh["edp"] if size > 1 else "alone"):
        named = [{"params": dense}, {"params": experts, "process_group": group}]
        formula = zerox.estimate(named, world_size, stage=stage)
        if group == size:
            first = formula
        assert formula == first
    torch.stack([(each * each).sum() for each in dense + experts]).sum().backward()
    optimizer.synchronize()
    with_grads = optimizer.memory_bytes()
    optimizer.step()
    optimizer.zero_grad()
    counted = optimizer.memory_bytes()
    return [
        (with_grads.gradients, first.gradients),
        (counted.parameters, first.parameters),
        (counted.master, first.master),
        (counted.moments, first.moments),
        (0 < first.typical_peak <= first.peak, True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_estimate_knows_how_many_ranks_have_the_experts(stage: int, size: int, dtype: torch.dtype) -> None:
    for found in run_ranks(weighed, 4, stage, size, dtype):
        for counted, formula in found:
            assert counted == formula, found


def test_the_estimate_refuses_subgroups_that_ranks_cannot_be_cut_into() -> None:
    experts = [{"params": [torch.zeros(3, requires_grad=True)], "process_group": 3}]
    with pytest.raises(ValueError, match="can't have 3 of 4 ranks"):
        zerox.estimate(experts, 4)
    experts[0]["process_group"] = 2
    with pytest.raises((ValueError, NotImplementedError), match="does not go with"):
        zerox.estimate(experts, 4, stage=3)
