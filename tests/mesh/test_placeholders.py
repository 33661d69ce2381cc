"""What p.grad answers and takes where gradients lie on other axes too: DTensors, and experts of some ranks only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.mesh import expert_models
from tests.mesh.parallel_models import Meshes, batch, local, loss_of, twins
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler

Built = tuple[nn.Module, FusedShardedAdam, Callable[[int], torch.Tensor]]


def of_dtensors() -> Built:
    meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    net, _ = twins(True, meshes, scaled=False)
    optimizer = FusedShardedAdam(net.named_parameters(), process_group=meshes.dp, lr=1e-2)
    return net, optimizer, lambda step: loss_of(net, batch(step).chunk(2)[meshes.dp.get_local_rank()])


def of_experts() -> Built:
    places = expert_models.Places(init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
    model, _ = expert_models.twins(places)
    optimizer = FusedShardedAdam(expert_models.groups(model, places.edp), lr=1e-2)
    return (
        model,
        optimizer,
        lambda step: expert_models.loss_of(model, *map(expert_models.own_part, expert_models.batch(step))),
    )


BUILT: dict[str, Callable[[], Built]] = {"DTensors": of_dtensors, "a param group's process_group": of_experts}


def grads_of(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def refused(rank: int, world_size: int, kind: str) -> list[str]:
    model, optimizer, loss = BUILT[kind]()
    loss(0).backward()
    with pytest.raises(RuntimeError) as asked:
        grads_of(model)[0].norm()
    optimizer.zero_grad()
    loss(0).backward()
    grads_of(model)[1].clamp_(-1, 1)
    with pytest.raises(RuntimeError) as changed:
        optimizer.step()
    return [str(asked.value), str(changed.value)]


@pytest.mark.parametrize("kind", BUILT)
def test_norms_and_limits_are_refused_by_name(kind: str) -> None:
    for asked, changed in run_ranks(refused, 4, kind):
        assert f"norm() of p.grad does not go with {kind}: call optimizer.clip_grad_norm_()" in asked
        assert "p.grad.clamp_() does not go with" in changed
        assert "one factor for all" in changed


def scaled(rank: int, world_size: int, kind: str, bad: bool) -> list[bool]:
    """torch's scaler beside zerox's, an inf on one rank, and a product of all."""
    params = []
    for make in (torch.amp.GradScaler, GradScaler):
        model, optimizer, loss = BUILT[kind]()
        scaler = make("cpu", init_scale=64.0, growth_interval=1)
        for step in range(3):
            scaler.scale(loss(step) * (float("inf") if bad and (rank, step) == (3, 1) else 1.0)).backward()
            scaler.unscale_(optimizer)
            if make is GradScaler:
                optimizer.scale_grads_(0.5)
            else:
                for grad in grads_of(model):
                    grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        params.append([local(param.detach()).clone() for param in model.parameters()] + [scaler.get_scale()])
    ours, theirs = params
    same = [torch.equal(a, b) for a, b in zip(ours[:-1], theirs[:-1], strict=True)]
    return [*same, ours[-1] == theirs[-1]]


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", BUILT)
def test_torchs_scaler_and_one_factor_for_all_are_taken(kind: str, bad: bool) -> None:
    for found in run_ranks(scaled, 4, kind, bad):
        assert all(found)
