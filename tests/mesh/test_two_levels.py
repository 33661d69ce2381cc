"""A mesh (replicate, shard): gradients are added up along the inner axis first, then along the outer one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerox
from tests.meshes import mesh_once
from tests.optimizer.combined import digest
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.ranks import advice

WORLD = 4
STEPS = 3
MAX_NORM = 0.05
SHAPES: list[tuple[int, ...]] = [(70, 90), (3,), (0,), (), (257, 33), (40,)]


class Awkward(nn.Module):
    """Parameters that are large, small, empty, of one element, and that some batches don't reach."""

    def __init__(self, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.weights = nn.ParameterList(map(nn.Parameter, weights))

    def forward(self, seed: int, skipped: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        factors = [torch.randn(weight.shape, generator=generator) for weight in self.weights]
        pairs = [pair for at, pair in enumerate(zip(self.weights, factors, strict=True)) if at not in skipped]
        return torch.stack([(weight.float() ** 2 * factor).sum() for weight, factor in pairs]).sum()


@dataclass(frozen=True)
class Case:
    """``sends``: backwards a step outside no_sync(), after one inside."""

    stage: int = 2
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    bucket_cap_mb: float | None = 0.02
    exchange: str = "direct"
    hides: bool = False
    sends: int = 1

    @property
    def bits(self) -> tuple[object, ...]:
        """What may show in the parameters' bits."""
        return self.dtype, self.reduce_dtype, self.sends


def loss_of(model: Awkward, rank: int, step: int, number: int) -> Tensor:
    skipped = {rank} if step == 1 else set()  # parameter 0 has no gradient on rank 0, and so on
    skipped |= {5} if step == 2 else set()  # this one on no rank
    return model(1000 * rank + 10 * step + number, sorted(skipped))


def trained(rank: int, mesh: DeviceMesh | None, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Digests of parameters and norms, and of rank 0's whole state."""
    monkeypatch.setenv("ZEROX_EXCHANGE", case.exchange)
    model = Awkward(case.dtype)
    optimizer = FusedShardedAdam(
        model.parameters(),
        lr=0.01,
        stage=case.stage,
        reduce_dtype=case.reduce_dtype,
        bucket_cap_mb=case.bucket_cap_mb,
        process_group=mesh,
    )
    if case.hides:
        optimizer.overlap_gather(model)
    norms = []
    for step in range(STEPS):
        with optimizer.no_sync():
            loss_of(model, rank, step, 0).backward()
        for number in range(1, 1 + case.sends):
            loss_of(model, rank, step, number).backward()
        norms.append(optimizer.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    optimizer.synchronize()
    state = optimizer.full_state_dict().get("state", {})
    kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
    return digest([*model.parameters(), *norms]), digest(kept)


def gathered(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(found, tensor.contiguous())
    return found


def mean_by_levels(grads: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """((a + b) + (c + d)) / 4 in float32, and in float64 of such, rounded once."""
    wide = torch.promote_types(wire, torch.float32)
    a, b, c, d = (grad.to(wire).to(wide) for grad in grads)
    return (((a + b) + (c + d)) / 4).to(wire)


def twin(rank: int, case: Case) -> tuple[str, str]:
    """One rank alone, which is given the mean of all ranks' gradients."""
    model, source = Awkward(case.dtype), Awkward(case.dtype)
    optimizer = FusedShardedAdam(model.parameters(), lr=0.01, stage=1, process_group="alone")
    norms = []
    for step in range(STEPS):
        for param, own in zip(model.parameters(), source.parameters(), strict=True):
            own.data.copy_(param.data)
        loss_of(source, rank, step, 0).backward()
        for number in range(1, 1 + case.sends):
            loss_of(source, rank, step, number).backward()
            for param, own in zip(model.parameters(), source.parameters(), strict=True):
                has = torch.tensor([own.grad is not None])
                if any(map(bool, gathered(has))):
                    grads = gathered(torch.zeros_like(own) if own.grad is None else own.grad)
                    mean = mean_by_levels(grads, case.reduce_dtype or case.dtype).to(case.dtype)
                    param.grad = mean if param.grad is None else param.grad + mean
            source.zero_grad()
        norms.append(optimizer.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    state = optimizer.full_state_dict()["state"] if rank == 0 else {}
    kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
    return digest([*model.parameters(), *norms]), digest(kept)


def mesh_of(*shape: int) -> DeviceMesh:
    return mesh_once(shape, ("replicate", "shard"))


CASES = [
    *(Case(stage=stage, bucket_cap_mb=cap) for stage in (1, 2, 3) for cap in (None, 0.001)),
    *(Case(exchange=exchange) for exchange in ("messages", "native")),
    *(Case(stage=stage, hides=True) for stage in (1, 2)),
    Case(sends=2),
    Case(reduce_dtype=torch.bfloat16),
    Case(dtype=torch.float64),
    Case(dtype=torch.float64, exchange="messages"),
    *(Case(dtype=torch.bfloat16, stage=stage) for stage in (1, 2, 3)),
    Case(dtype=torch.bfloat16, exchange="messages", hides=True),
]


def all_cases(rank: int, _: int) -> tuple[list[tuple[str, str]], dict[tuple[object, ...], tuple[str, str]]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mesh = mesh_of(2, 2)
        twins = {case.bits: twin(rank, case) for case in CASES}
        return [trained(rank, mesh, case, monkeypatch) for case in CASES], twins


def test_sums_are_taken_by_levels_and_nothing_else_shows_in_the_bits() -> None:
    by_rank = run_ranks(all_cases, WORLD)
    wrong = []
    for rank, (found, twins) in enumerate(by_rank):
        for case, digests in zip(CASES, found, strict=True):
            if digests != twins[case.bits]:
                wrong.append(f"rank {rank}: {case}")
    assert not wrong, "\n".join(wrong)


# ---- what is sent


def sent_of(rank: int, _: int, shape: tuple[int, int], reduce_dtype: torch.dtype | None) -> Any:
    """(shard_numel, trailer_numel) of each bucket, and what a backward and a step sent over each axis."""
    model = Awkward(torch.float32)
    optimizer = FusedShardedAdam(
        model.parameters(), process_group=mesh_of(*shape), reduce_dtype=reduce_dtype, bucket_cap_mb=0.02
    )
    manager = optimizer.inside.manager
    before = manager.traffic_by_axis
    loss_of(model, rank, 0, 0).backward()
    optimizer.synchronize()
    between = manager.traffic_by_axis
    optimizer.step()
    after = manager.traffic_by_axis
    shapes = [(b.plan.layout.shard_numel, b.plan.layout.trailer_numel) for b in optimizer.inside.buckets]

    def less(more: list[tuple[int, int]], fewer: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(a - c, b - d) for (a, b), (c, d) in zip(more, fewer, strict=True)]

    return shapes, less(between, before), less(after, between)


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_messages_and_bytes_over_each_axis_are_those_of_closed_forms(
    shape: tuple[int, int], reduce_dtype: torch.dtype | None
) -> None:
    outer, inner = shape
    wire_bytes = (reduce_dtype or torch.float32).itemsize
    for shapes, backward, step in run_ranks(sent_of, outer * inner, shape, reduce_dtype):
        slices, shards = sum(map(sum, shapes)), sum(shard for shard, _ in shapes)
        assert backward == [
            ((inner - 1) * len(shapes), (inner - 1) * outer * slices * wire_bytes),
            ((outer - 1) * len(shapes), (outer - 1) * slices * 4),  # sums that are not rounded yet
        ]
        assert step == [
            ((inner - 1) * len(shapes), (inner - 1) * outer * shards * 4),
            ((outer - 1) * len(shapes), (outer - 1) * shards * 4),
        ]
        flat_over_outer_axis = (outer - 1) * inner * slices * 4
        assert backward[1][1] * inner == flat_over_outer_axis, "1/G of what a flat exchange sends between machines"


# ---- meshes of other shapes, and wrong ones


def lines(rank: int, _: int) -> list[tuple[str, str]]:
    """A mesh with one rank on an axis is a group, with the group's bits."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        meshes = [None, mesh_of(1, WORLD), mesh_of(WORLD, 1), init_device_mesh("cpu", (WORLD,))]
        return [trained(rank, mesh, Case(), monkeypatch) for mesh in meshes]


def test_a_mesh_that_is_one_line_has_the_bits_of_a_group() -> None:
    for found in run_ranks(lines, WORLD):
        assert len(set(found)) == 1


def part_of_a_larger_mesh(rank: int, _: int) -> str:
    """Two meshes (replicate, shard) beside each other, as with tensor parallelism."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    mesh = whole["replicate", "shard"]
    param = nn.Parameter(torch.full((5000,), float(rank)))
    if rank == 0:  # which asks no other rank for a group
        assert zerox.estimate([param], 4, process_group=mesh) == zerox.estimate([param], 4, mesh_shape=(2, 2))
    optimizer = FusedShardedAdam([param], process_group=mesh)
    assert dist.get_process_group_ranks(optimizer.inside.ranks.given) == [0, 2, 4, 6] if rank % 2 == 0 else [1, 3, 5, 7]
    assert torch.equal(param, torch.full((5000,), float(rank % 2))), "the values are those of the mesh's rank 0"
    again = FusedShardedAdam([nn.Parameter(torch.ones(3))], process_group=mesh)
    assert again.inside.ranks.given is optimizer.inside.ranks.given
    param.grad = torch.full((5000,), float(rank))
    optimizer.step()
    return digest([param])


def test_a_mesh_may_be_a_part_of_a_larger_one() -> None:
    found = run_ranks(part_of_a_larger_mesh, 8)
    assert found[0::2] == [found[0]] * 4
    assert found[1::2] == [found[1]] * 4


def wrong_meshes(rank: int, _: int) -> None:
    params = [nn.Parameter(torch.ones(3))]
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    with pytest.raises(ValueError, match=r'1 dimension, or 2 \(replicate, shard\), got 3: pass .*mesh\["replicate"'):
        FusedShardedAdam(params, process_group=three)
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    with pytest.raises(ValueError, match=r"\(replicate, shard\), in this order, .*'dp_shard', 'dp_replicate'"):
        FusedShardedAdam(params, process_group=turned)
    with pytest.raises(ValueError, match=r"must ascend along both axes, got \[\[3, 2\], \[1, 0\]\]"):
        FusedShardedAdam(params, process_group=DeviceMesh("cpu", [[3, 2], [1, 0]]))
    group = None if rank == 3 else mesh_of(2, 2)
    if rank == 3:
        mesh_of(2, 2)  # collective
    with pytest.raises(ValueError, match=r"ranks must agree: .*on a mesh \(replicate, shard\) of \(2, 2\)"):
        FusedShardedAdam(params, process_group=group)


def test_wrong_meshes_are_refused_on_all_ranks() -> None:
    run_ranks(wrong_meshes, WORLD)


def on_two_machines(rank: int, world_size: int) -> list[str]:
    """What each of some constructions told, where torchrun says that there are two machines."""
    told = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world_size // 2))
        monkeypatch.setattr(advice, "_advised", [])
        groups = (dist.group.WORLD, mesh_of(2, 2), None, None)
        for group in groups:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                FusedShardedAdam([nn.Parameter(torch.ones(3))], process_group=group)
            told.append("".join(str(each.message) for each in caught))
    return told


def test_ranks_on_several_machines_are_told_once_of_a_mesh() -> None:
    of_rank_0, *others = run_ranks(on_two_machines, WORLD)
    assert of_rank_0[:2] == ["", ""]
    assert 'process_group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))' in of_rank_0[2]
    assert "1/2 of the bytes" in of_rank_0[2]
    assert of_rank_0[3] == ""
    assert others == [[""] * 4] * 3


# ---- checkpoints


def saved(rank: int, _: int, folder: str) -> str:
    model = Awkward(torch.float32)
    optimizer = FusedShardedAdam(model.parameters(), process_group=mesh_of(2, 2), bucket_cap_mb=0.02)
    loss_of(model, rank, 0, 0).backward()
    optimizer.step()
    zerox.save(folder, model, optimizer)
    return digest(list(model.parameters()))


def loaded(rank: int, world_size: int, folder: str, shape: tuple[int, int] | None) -> tuple[str, list[Tensor]]:
    model = Awkward(torch.float32)
    mesh = None if shape is None else mesh_of(*shape)
    optimizer = FusedShardedAdam(model.parameters(), process_group=mesh)
    zerox.load(folder, model, optimizer)
    state = optimizer.full_state_dict().get("state", {})
    return digest(list(model.parameters())), [entry["exp_avg"] for _, entry in sorted(state.items())]


@pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (6, (2, 3)), (4, None), (1, None)])
def test_a_checkpoint_goes_to_other_meshes(tmp_path: Path, world_size: int, shape: tuple[int, int] | None) -> None:
    before = run_ranks(saved, WORLD, str(tmp_path / "saved"))
    after = run_ranks(loaded, world_size, str(tmp_path / "saved"), shape)
    assert {found for found, _ in after} == set(before)
    whole = Awkward(torch.float32)
    for rank in range(WORLD):
        (loss_of(whole, rank, 0, 0) / WORLD).backward()
    for param, exp_avg in zip(whole.parameters(), after[0][1], strict=True):
        assert param.grad is not None
        torch.testing.assert_close(exp_avg, param.grad * 0.1, rtol=1e-5, atol=1e-6)
