"""Whether parameters lie whole on one rank shows in no bit of an elementwise rule's parameters, state and norms."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.bucket_manager.test_zero_copy import from_bytes
from tests.mesh.test_two_levels import SHAPES as OF_MESH
from tests.mesh.test_two_levels import Awkward as OfMesh
from tests.meshes import mesh_once
from tests.optimizer.combined import digest
from tests.ranks import run_ranks
from tests.whole.rig import unequal_buckets, whole
from zerox import FusedShardedAdam

STEPS = 3
SHAPES = [*OF_MESH, (130, 64), (4096,), (9, 9), (100, 100)]


class Awkward(OfMesh):
    """More parameters, and a transposed one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype, SHAPES)
        self.weights[6] = nn.Parameter(self.weights[6].detach().t())


@dataclass(frozen=True)
class Case:
    """``zero_copy``: from so many bytes on gradients are not packed. ``sgd``: every third parameter is in a group of
    SGD, and cut. ``outer``: some backwards are inside no_sync(outer=True)."""

    stage: int = 2
    exchange: str = "direct"
    dtype: torch.dtype = torch.float32
    cap_mb: float = 0.1
    zero_copy: int = 10**9
    options: tuple[tuple[str, Any], ...] = ()
    sgd: bool = False
    hides: bool = False
    outer: bool = False


def loss_of(model: Awkward, rank: int, step: int, number: int) -> Tensor:
    skipped = {rank, rank + 4} if step == 1 else set()  # parameters 0 and 4 have no gradient on rank 0, and so on
    skipped |= {5, 9} if step == 2 else set()  # these on no rank
    return model(1000 * rank + 10 * step + number, sorted(skipped))


def make(case: Case, model: Awkward, group: DeviceMesh | None) -> FusedShardedAdam:
    params = list(model.parameters())
    groups: list[Any] = params
    if case.sgd:
        of_sgd = {"params": params[::3], "rule": "sgd", "momentum": 0.9}
        groups = [{"params": [p for i, p in enumerate(params) if i % 3]}, of_sgd]
    options = {"lr": 0.01, "stage": case.stage, "bucket_cap_mb": case.cap_mb, **dict(case.options)}
    os.environ["ZEROX_EXCHANGE"] = case.exchange
    try:
        with from_bytes(case.zero_copy):
            return FusedShardedAdam(groups, process_group=group, **options)
    finally:
        del os.environ["ZEROX_EXCHANGE"]


def trained(rank: int, case: Case, is_whole: bool, group: DeviceMesh | None = None) -> tuple[list[str], int]:
    """Digests of parameters, of a gradient with norms, and on rank 0 of the state; how many buckets are unequal."""
    model = Awkward(case.dtype)
    with whole(is_whole):
        optimizer = make(case, model, group)
    if case.hides:
        optimizer.overlap_gather(model)
    told: list[Tensor] = []
    for step in range(STEPS):
        with optimizer.no_sync():
            loss_of(model, rank, step, 0).backward()
        if case.outer:
            with optimizer.no_sync(outer=True):
                loss_of(model, rank, step, 1).backward()
        loss_of(model, rank, step, 2).backward()
        loss_of(model, rank, step, 3).backward()
        if step == 1:
            gradient = optimizer.full_grad(model.weights[9])
            assert gradient is not None
            told.append(gradient)
            optimizer.set_full_grad_(model.weights[6], torch.ones_like(model.weights[6], dtype=torch.float32))
        told.append(optimizer.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    optimizer.synchronize()
    with optimizer.whole():
        params = digest(list(model.parameters()))
    state = optimizer.full_state_dict().get("state", {})
    kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
    return [params, digest(told), digest(kept)], unequal_buckets(optimizer)


EIGHT_BITS = (("state_dtype", "8bit"),)
BFLOAT16 = torch.bfloat16
CASES = [
    *(Case(stage, exchange) for stage in (1, 2, 3) for exchange in ("direct", "messages")),
    *(Case(stage, exchange, zero_copy=4) for stage in (1, 2) for exchange in ("direct", "messages")),
    *(Case(stage, zero_copy=30_000, cap_mb=10.0) for stage in (1, 2, 3)),
    Case(exchange="messages", zero_copy=10_000, cap_mb=0.05),
    Case(stage=3, cap_mb=0.02, options=(("resident_mb", 0.05),)),
    Case(stage=3, exchange="messages", cap_mb=0.02, options=(("resident_mb", 0.05),)),
    *(Case(stage, hides=True) for stage in (1, 2)),
    *(Case(stage, dtype=BFLOAT16, options=EIGHT_BITS) for stage in (1, 3)),
    Case(dtype=BFLOAT16, options=(("master_weights", "fp32"), ("reduce_dtype", torch.float32))),
    *(Case(stage, sgd=True, options=EIGHT_BITS) for stage in (2, 3)),
]


def both(rank: int, world_size: int, cases: Sequence[Case], shape: tuple[int, int] | None = None) -> list[Any]:
    """Of each case, what shows with cut parameters, and with whole ones."""
    mesh = None if shape is None else mesh_once(shape, ("replicate", "shard"))
    return [[trained(rank, case, is_whole, mesh) for is_whole in (False, True)] for case in cases]


def assert_same(cases: Sequence[Case], by_rank: Sequence[Sequence[Any]]) -> None:
    for rank, found in enumerate(by_rank):
        for case, ((cut, num_cut), (owned, num_owned)) in zip(cases, found, strict=True):
            assert num_cut == 0
            assert num_owned > 0 or len(by_rank) == 1, f"{case} is no test of shards of several lengths"
            assert cut == owned, f"rank {rank}: {case}"
            assert cut[:2] == by_rank[0][cases.index(case)][0][0][:2], f"rank {rank} and 0: {case}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_whole_parameters_have_the_bits_of_cut_ones(world_size: int) -> None:
    assert_same(CASES, run_ranks(both, world_size, CASES))


ON_MESH = [
    *(Case(stage, exchange) for stage in (1, 2, 3) for exchange in ("direct", "messages")),
    *(Case(stage, outer=True) for stage in (2, 3)),
    Case(hides=True),
    Case(stage=3, cap_mb=0.02, options=(("resident_mb", 0.05),)),
    Case(dtype=BFLOAT16, options=EIGHT_BITS),
]


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_whole_parameters_have_the_bits_of_cut_ones_on_a_mesh(shape: tuple[int, int]) -> None:
    assert_same(ON_MESH, run_ranks(both, shape[0] * shape[1], ON_MESH, shape))
