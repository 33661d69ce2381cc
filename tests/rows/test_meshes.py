"""Tables on meshes: of two data-parallel axes, beside experts, in pipeline stages and beside DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zerox
from tests.meshes import mesh_once
from tests.ranks import run_ranks
from tests.rows.tables import NARROW, OPTIONS, Model, Twin, backward, build
from zerox import FusedShardedAdam, estimate, sparse_params

WORLD, STEPS = 4, 4


def mesh_of(names: tuple[str, str]) -> DeviceMesh:
    return mesh_once((2, 2), names)


# ---- two data-parallel axes


def over_two_axes(rank: int, world_size: int, stage: int, kind: str, path: str, device: str = "cpu") -> None:
    dtype, options = NARROW.get(kind, (torch.float32, {}))
    model = Model(seed=rank).to(device, dtype)
    mesh = mesh_of(("replicate", "shard"))
    optimizer = build(model, stage=stage, process_group=mesh, **options)
    assert optimizer.inside.ranks.on_mesh
    twin = Twin(model, WORLD, **options)
    for step in range(STEPS):
        twin.copy_dense(model)
        twin.take_gradients(step)
        backward(model, rank, step)
        if step == 2:
            norm = optimizer.clip_grad_norm_(0.05)
            parts = [p.grad._values().flatten() for p in twin.tables if p.grad is not None]
            parts += [optimizer.full_grad(p).flatten() / min(1.0, 0.05 / float(norm)) for p in model.head.parameters()]
            torch.testing.assert_close(norm, torch.cat(parts).norm())
            for p in twin.tables:
                if p.grad is not None:
                    p.grad._values().mul_((0.05 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        twin.step()
        optimizer.zero_grad()
        twin.check(optimizer, model)
    most = max(table.own_rows.numel() for table in optimizer.inside.tables)
    assert most <= 128, "rows are dealt among all four ranks"
    zerox.save(path, model, optimizer)
    other = Model(seed=5).to(device, dtype)
    again = build(other, stage=stage, process_group=mesh, **options)
    zerox.load(path, other, again)
    twin.check(again, other)


@pytest.mark.parametrize(("stage", "kind"), [(1, ""), (2, ""), (2, "bf16")])
def test_a_mesh_of_two_axes_has_the_bits_of_sparse_adam(stage: int, kind: str, tmp_path: Path) -> None:
    """On the mean over all of its ranks, in their order."""
    run_ranks(over_two_axes, WORLD, stage, kind, str(tmp_path / "checkpoint"))


def in_stage_3(rank: int, size: int) -> None:
    mesh, model = mesh_of(("replicate", "shard")), Model()
    with pytest.raises(ValueError, match=r"does not go with stage=3 on a 2-D mesh.*Use stage=2"):
        build(model, stage=3, process_group=mesh)
    groups = [{"params": sparse_params(model), "sparse": True, "weight_decay": 0.0}]
    with pytest.raises(ValueError, match="does not go with stage=3 on a 2-D mesh"):
        estimate(groups, 4, stage=3, process_group=mesh)
    assert estimate(groups, 4, process_group=mesh) == estimate(groups, 4)


def test_stage_3_on_a_mesh_of_two_axes_is_refused() -> None:
    run_ranks(in_stage_3, WORLD)


# ---- experts


class Experts(nn.Module):
    """Each pair of ranks has an expert of its own, beside the tables."""

    def __init__(self, seed: int, subgroup: int) -> None:
        super().__init__()
        self.tables = Model(seed)
        self.expert = nn.ParameterDict({str(subgroup): torch.full((7,), float(subgroup + 1))})

    def forward(self, rank: int, step: int) -> None:
        backward(self.tables, rank, step)
        (next(iter(self.expert.values())) * (rank + step + 1)).sum().backward()


def groups_of(model: Experts, subgroup: Any) -> list[dict[str, Any]]:
    return [
        {"params": list(model.tables.head.parameters())},
        {"params": sparse_params(model), "sparse": True, "weight_decay": 0.0},
        {"params": list(model.expert.values()), "process_group": subgroup},
    ]


def beside_experts(rank: int, world_size: int, stage: int, path: str) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, plain = Experts(rank, rank % 2), Model()
    optimizer = FusedShardedAdam(groups_of(model, pairs[rank % 2]), stage=stage, **OPTIONS)
    beside = build(plain, stage=stage)  # without experts, and with the norm that theirs make clip alike
    twin = Twin(model.tables, WORLD)
    for step in range(STEPS):
        twin.copy_dense(model.tables)
        twin.take_gradients(step)
        model(rank, step)
        backward(plain, rank, step)
        norm, without = optimizer.clip_grad_norm_(float("inf")), beside.clip_grad_norm_(float("inf"))
        of_experts = [sum(other + step + 1 for other in subgroup) / WORLD for subgroup in ((0, 2), (1, 3))]
        expected = torch.cat([without.reshape(1), *(torch.full((7,), each) for each in of_experts)]).norm()
        torch.testing.assert_close(norm, expected)
        for each in (optimizer, beside):
            each.step()
            each.zero_grad()
        twin.step()
        for ours, theirs in zip(sparse_params(model), twin.tables, strict=True):
            assert torch.equal(ours, theirs)
    zerox.save(path, model, optimizer)
    other = Experts(9, rank % 2)
    again = FusedShardedAdam(groups_of(other, pairs[rank % 2]), stage=stage, **OPTIONS)
    zerox.load(path, other, again)
    for param, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(param, saved)
    for ours, saved in zip(again.inside.tables, optimizer.inside.tables, strict=True):
        assert int(ours.step) == int(saved.step)
        assert all(torch.equal(ours.kept[key], saved.kept[key]) for key in saved.kept)


@pytest.mark.parametrize("stage", [1, 2])
def test_tables_beside_experts_have_the_bits_of_sparse_adam(stage: int, tmp_path: Path) -> None:
    run_ranks(beside_experts, WORLD, stage, str(tmp_path / "checkpoint"))


def of_experts(rank: int, size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Model()
    group = {"params": sparse_params(model), "sparse": True, "weight_decay": 0.0, "process_group": pairs[rank % 2]}
    with pytest.raises(ValueError, match=r"param group 1 does not go with a process_group of its own.*of their own"):
        FusedShardedAdam([{"params": model.head.parameters()}, group])
    with pytest.raises(ValueError, match="does not go with a process_group of its own"):
        estimate([group], 4)


def test_tables_of_experts_are_refused() -> None:
    run_ranks(of_experts, WORLD)


# ---- stages of a pipeline


def in_stages(rank: int, world_size: int, stage: int, device: str = "cpu") -> float:
    """Each stage has tables of its own, and the norm is over all."""
    mesh = mesh_of(("pp", "dp"))
    place, of = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = Model(seed=100 * place + rank).to(device)
    optimizer = build(model, stage=stage, process_group=mesh["dp"], norm_group=mesh["pp"])
    plain = Model().to(device)
    plain.load_state_dict(whole(model, optimizer))
    beside = build(plain, stage=stage, process_group=mesh["dp"])
    for step in range(STEPS):
        for each in (model, plain):
            backward(each, of, step)
        own = beside.clip_grad_norm_(float("inf")).double()
        squares = own.square().cpu()
        dist.all_reduce(squares, group=mesh.get_group("pp"))
        norm = optimizer.clip_grad_norm_(0.05)
        torch.testing.assert_close(norm.double().cpu(), squares.sqrt(), rtol=1e-6, atol=0)
        beside.scale_grads_(float((0.05 / (norm + 1e-6)).clamp(max=1.0)))
        for of_both in (optimizer, beside):
            of_both.step()
            of_both.zero_grad()
        ours, theirs = whole(model, optimizer), whole(plain, beside)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    return float(norm)


def whole(model: nn.Module, optimizer: FusedShardedAdam) -> dict[str, Tensor]:
    with optimizer.whole():
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_over_pipeline_stages_has_their_tables(stage: int) -> None:
    assert len(set(run_ranks(in_stages, WORLD, stage))) == 1


# ---- DTensors


class Cut(nn.Module):
    """Tables that all ranks have, beside a weight that is cut along ``tp``."""

    def __init__(self, seed: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tables = Model(seed)
        self.weight = nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 20), mesh, [Shard(0)]))

    def forward(self, of: int, step: int) -> None:
        backward(self.tables, of, step)
        (self.weight.to_local() * (of + step + 1)).sum().backward()


def beside_dtensors(rank: int, world_size: int, stage: int, path: str) -> float:
    """The ranks of tp have the same batches, and one of them counts rows in the norm."""
    mesh = mesh_of(("dp", "tp"))
    of = mesh["dp"].get_local_rank()
    model = Cut(rank, mesh["tp"])
    groups = [
        {"params": [*model.tables.head.parameters(), model.weight]},
        {"params": sparse_params(model), "sparse": True, "weight_decay": 0.0},
    ]
    optimizer = FusedShardedAdam(groups, stage=stage, process_group=mesh["dp"], **OPTIONS)
    plain = Model()
    beside = build(plain, stage=stage, process_group=mesh["dp"])
    for name, value in whole(model.tables, optimizer).items():
        assert torch.equal(value, whole(plain, beside)[name]), "rank 0's, on all ranks"
    for step in range(STEPS):
        model(of, step)
        backward(plain, of, step)
        norm, without = optimizer.clip_grad_norm_(0.05), beside.clip_grad_norm_(float("inf"))
        expected = torch.cat([without.reshape(1), torch.full((20,), (1 + 2) / 2 + step)]).norm()
        torch.testing.assert_close(norm, expected)
        beside.scale_grads_(float((0.05 / (norm + 1e-6)).clamp(max=1.0)))
        for of_both in (optimizer, beside):
            of_both.step()
            of_both.zero_grad()
        ours, theirs = whole(model.tables, optimizer), whole(plain, beside)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    zerox.save(path, model, optimizer)
    before, state = whole(model, optimizer), optimizer.full_state_dict()
    model(of, 9)
    optimizer.step()
    zerox.load(path, model, optimizer)
    for name, value in whole(model, optimizer).items():
        one, other = (each.full_tensor() if isinstance(each, DTensor) else each for each in (value, before[name]))
        assert torch.equal(one, other)
    torch.testing.assert_close(optimizer.full_state_dict().get("state"), state.get("state"), rtol=0, atol=0)
    return float(norm)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tables_beside_dtensors_train_as_without(stage: int, tmp_path: Path) -> None:
    assert len(set(run_ranks(beside_dtensors, WORLD, stage, str(tmp_path / "checkpoint")))) == 1


def as_dtensor(rank: int, size: int) -> None:
    mesh = mesh_of(("dp", "tp"))
    table = nn.Parameter(distribute_tensor(torch.ones(70, 4), mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match="is a DTensor: tables are plain tensors, whole on every rank"):
        FusedShardedAdam([{"params": [table], "sparse": True, "weight_decay": 0.0}], process_group=mesh["dp"])


def test_a_table_that_is_a_dtensor_is_refused() -> None:
    run_ranks(as_dtensor, WORLD)
