"""Masks of experts, which each rank shares with some others only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerox
from tests.mesh.expert_models import Mixture, Places, batch, groups, loss_of, own_part, twins
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, Sparsity

TARGETS = {"into.weight": 0.3, "experts.*": 0.75}


def trained(places: Places, steps: int, bucket_cap_mb: float) -> tuple[Mixture, Any, Sparsity, list[dict[str, Tensor]]]:
    """And what masks should be after each step, by kthvalue on whole tensors."""
    model, _ = twins(places)
    optimizer = FusedShardedAdam(groups(model, places.edp), lr=1e-2, bucket_cap_mb=bucket_cap_mb)
    schedule = zerox.cubic(0, 4, 1)
    sparsity = Sparsity(optimizer, TARGETS, schedule)
    expected = [sparsity.masks()]
    for step in range(1, steps + 1):
        loss_of(model, *map(own_part, batch(step))).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        values = {name: model.get_parameter(name).detach().abs() for name in expected[-1]}
        sparsity.step()
        optimizer.zero_grad()
        masks = {}
        for name, kept in expected[-1].items():
            part = TARGETS["into.weight" if name == "into.weight" else "experts.*"] * schedule.part(step)
            ranked = torch.where(kept, values[name], -1.0)
            masks[name] = kept & (ranked > ranked.flatten().kthvalue(round(part * ranked.numel())).values)
        expected.append(masks)
        found = sparsity.masks()
        assert all(torch.equal(found[name], kept) for name, kept in masks.items()), f"step {step}"
        assert not any(model.get_parameter(name)[~kept].any() for name, kept in masks.items()), f"step {step}"
    return model, optimizer, sparsity, expected


def experts(rank: int, world: int, folder: Path, bucket_cap_mb: float) -> list[bool]:
    places = Places(init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
    model, optimizer, sparsity, expected = trained(places, 4, bucket_cap_mb)
    reached = sparsity.sparsity()
    told = zerox.estimate(groups(model, places.edp), world, masks=TARGETS, bucket_cap_mb=bucket_cap_mb)
    assert told.moments == optimizer.memory_bytes().moments
    found = [len(expected[-1]) == 3, all(value > 0.7 for name, value in reached.items() if "experts" in name)]
    zerox.save(folder, model, optimizer)
    whole = Mixture()  # all experts on each rank
    plain = FusedShardedAdam(whole.named_parameters(), lr=1e-2)
    masks = Sparsity(plain, TARGETS, zerox.cubic(0, 4, 1))
    zerox.load(folder, whole, plain)
    everyones = masks.masks()
    found.append(len(everyones) == 5)
    found += [torch.equal(everyones[name], kept) for name, kept in expected[-1].items()]
    return found


@pytest.mark.parametrize("bucket_cap_mb", [16.0, 0.0005])
def test_masks_of_experts_are_chosen_among_the_ranks_that_have_them(bucket_cap_mb: float, tmp_path: Path) -> None:
    for found in run_ranks(experts, 4, tmp_path / "x", bucket_cap_mb):
        assert found == [True] * 6


def together(rank: int, world: int) -> str:
    places = Places(init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
    optimizer = FusedShardedAdam(groups(twins(places)[0], places.edp), lr=1e-2)
    with pytest.raises(ValueError, match='scope="global"') as caught:
        Sparsity(optimizer, {"*": 0.5}, scope="global")
    return str(caught.value)


def test_experts_are_not_ranked_with_others() -> None:
    for said in run_ranks(together, 4):
        assert "is an expert's, which not all ranks have" in said
