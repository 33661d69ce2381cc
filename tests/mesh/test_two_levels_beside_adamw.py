"""Hybrid sharding, 2 x 2 ranks: 20 clipped steps beside torch's AdamW on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from zerox import FusedShardedAdam

WORLD, STEPS = 4, 20
OF_ONE_RANK = 8  # samples
LR = 1e-3
MAX_NORM = 0.1  # below all norms here


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 4))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :4]).square().mean()


def trained(rank: int, _: int, stage: int) -> tuple[float, float, list[float]]:
    """The largest difference of a parameter, the largest relative one of a norm, and this rank's norms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = make(), make()
    ours = FusedShardedAdam(model.parameters(), lr=LR, stage=stage, process_group=mesh)
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
    norms, expected = [], []
    for step in range(STEPS):
        batch = torch.randn(WORLD * OF_ONE_RANK, 48, generator=torch.Generator().manual_seed(step))
        loss_of(model, batch[rank * OF_ONE_RANK :][:OF_ONE_RANK]).backward()
        loss_of(twin, batch).backward()
        norms.append(float(ours.clip_grad_norm_(MAX_NORM)))
        expected.append(float(nn.utils.clip_grad_norm_(twin.parameters(), MAX_NORM)))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert min(expected) > MAX_NORM
    with ours.whole():
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        far = max(float((p - q).abs().max()) for p, q in pairs)
    return far, max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True)), norms


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_and_norms_are_those_of_adamw(stage: int) -> None:
    found = run_ranks(trained, WORLD, stage)
    assert all(far <= 2e-6 and relative <= 1e-6 for far, relative, _ in found), found
    assert all(norms == found[0][2] for *_, norms in found)
