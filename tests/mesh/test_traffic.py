"""What ranks of a model axis send each other in a step, in closed form: the norm, and shards of Partial gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.ranks import Once
from zerox import FusedShardedAdam
from zerox.ops import EXACT_LIMBS

NUMEL = 16384  # of the parameter that is the same along tp; large enough to be cut evenly
OF_NORM = (1, EXACT_LIMBS * 8)
OF_SHARD = (1, NUMEL // 2 * 4)  # over two data-parallel ranks


def added(*given: tuple[int, int]) -> tuple[int, int]:
    return sum(calls for calls, _ in given), sum(nbytes for _, nbytes in given)


# By axis, what a rank gives in a step: tp, whose ranks are nearer, then pp.
EXPECTED = {
    "Replicate": [(0, 0), (0, 0)],
    "Replicate, clipped": [OF_NORM, OF_NORM],
    "Partial": [OF_SHARD, (0, 0)],
    "Partial, clipped": [added(OF_SHARD, OF_NORM), OF_NORM],
}


def traffic(rank: int, _: int) -> dict[str, list[tuple[int, int]]]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    found = {}
    for placement in (Replicate(), Partial()):
        torch.manual_seed(mesh["pp"].get_local_rank())
        same = nn.Parameter(distribute_tensor(torch.randn(NUMEL), mesh["tp"], [Replicate()]))
        cut = nn.Parameter(distribute_tensor(torch.randn(2 * NUMEL), mesh["tp"], [Shard(0)]))
        named = [("same", same), ("cut", cut)]
        optimizer = FusedShardedAdam(named, process_group=mesh["dp"], norm_group=mesh["pp"])
        model = optimizer.inside.grads.model
        for clips in ("", ", clipped"):
            before = model.traffic_by_axis
            same.grad = DTensor.from_local(torch.ones(NUMEL), mesh["tp"], [placement], run_check=False)
            cut.grad = DTensor.from_local(torch.ones(NUMEL), mesh["tp"], [Shard(0)], run_check=False)
            if clips:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            pairs = zip(before, model.traffic_by_axis, strict=True)
            of_step = [(calls - of_calls, nbytes - of_nbytes) for (of_calls, of_nbytes), (calls, nbytes) in pairs]
            found[f"{type(placement).__name__}{clips}"] = of_step
    return found


found = Once(traffic, 8, timeout_s=120)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_axis_carries_the_norm_and_partial_shards_only(name: str) -> None:
    for of_rank in found():
        assert of_rank[name] == EXPECTED[name]
