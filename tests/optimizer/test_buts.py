"""Each **But** of zerox/plan/combinations.py is what the table says: something shows it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.optimizer.combined import Training
from tests.optimizer.made import arguments
from tests.optimizer.ways import Pair, Way, name_of, needs_accelerator, pairs_with, way_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD, ShardedOptimizer
from zerox.plan.choices import A_SUBGROUP, SUBGROUP, TABLES, Setting, some
from zerox.plan.combinations import But


def lost_updates(way: Way) -> None:
    dtype = getattr(torch, way["parameters"])
    lr = torch.finfo(dtype).eps / 8  # below 1 the last place is worth eps / 2
    kept = {}
    for master in ("auto", None):
        param = nn.Parameter(torch.ones(8, dtype=dtype))
        optimizer = FusedShardedAdam([param], lr=lr, weight_decay=0.0, master_weights=master)
        for _ in range(16):
            param.grad = torch.ones(8, dtype=dtype)
            optimizer.step()
        kept[master] = param.detach()
    assert torch.equal(kept[None], torch.ones(8, dtype=dtype))
    assert (kept["auto"] < 1).all()


def float64_moments(way: Way) -> None:
    training = Training(0, way)
    for state in training.optimizer.state.values():
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float64


def mean(rank: int, world_size: int, way: Way, exchange: str, local: list[Tensor], changes: dict[str, Any]) -> Tensor:
    """What stage 1 leaves in p.grad of gradients that are given."""
    dtype = getattr(torch, way["parameters"])
    params = [nn.Parameter(torch.zeros(part.numel(), dtype=dtype)) for part in local[rank].split(500)]
    optimizer = FusedShardedAdam(params, **{**arguments(way), "stage": 1, "exchange": exchange, **changes})
    parts = [part.to(dtype) for part in local[rank].split(500)]
    torch.stack([(p * g).float().sum() for p, g in zip(params, parts, strict=True)]).sum().backward()
    optimizer.synchronize()
    return torch.cat([param.grad for param in params if param.grad is not None])


def gradients() -> list[Tensor]:
    return [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]


def sums_in_16_bits(way: Way) -> None:
    wire = arguments(way)["reduce_dtype"] or getattr(torch, way["parameters"])
    local = [each.to(wire).float() for each in gradients()]
    if wire is torch.float16:
        local = [each.abs() + 30000 for each in local]
        local = [each.to(wire).float() for each in local]
    dtype = getattr(torch, way["parameters"])
    exact = ((local[0] + local[1] + local[2]) / 3).to(wire).to(dtype)
    direct, native = (run_ranks(mean, 3, way, exchange, local, {})[0] for exchange in ("direct", "native"))
    assert torch.equal(direct, exact)
    assert not torch.equal(native, exact)
    assert native.isinf().all() if wire is torch.float16 else not native.isinf().any()
    if way["reduce_dtype"] == "None":
        widened = run_ranks(mean, 3, way, "native", local, {"reduce_dtype": torch.float32})[0]
        torch.testing.assert_close(widened, exact, rtol=torch.finfo(dtype).eps, atol=0)


def order_of_the_backend(way: Way) -> None:
    local = gradients()
    for exchange, same in (("direct", True), ("native", False)):
        caps = [run_ranks(mean, 3, way, exchange, local, {"bucket_cap_mb": cap})[0] for cap in (1e-6, 0.004, 16.0)]
        assert all(torch.equal(each, caps[0]) for each in caps) is same, exchange


def each(one: tuple[Setting, ...], other: tuple[Setting, ...], show: Callable[[Way], None]) -> dict[Any, Any]:
    return {frozenset(pair): show for pair in itertools.product(one, other)}


def warning_of_overlap(rank: int, world_size: int, way: Way) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Training(rank, way).run()
    return [str(each.message) for each in said if "nothing to hide" in str(each.message)]


def nothing_to_hide(way: Way) -> None:
    assert [len(each) for each in run_ranks(warning_of_overlap, 2, way)] == [1, 1]


class Factored(torch.optim.SGD):
    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:  # type: ignore[override]
        return super().step(closure)


def step_with_options(rank: int, world_size: int, way: Way) -> str:
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(8))], Factored, lr=0.1)

    def train() -> None:
        with optimizer.join():
            for _ in range(2 - rank):
                optimizer.param_groups[0]["params"][0].sum().backward()
                optimizer.step(factor=2.0)

    with pytest.raises(RuntimeError) as raised:
        train()
    return str(raised.value)


def step_options_are_not_followed(way: Way) -> None:
    assert all("can't follow step() with options of its own" in said for said in run_ranks(step_with_options, 2, way))


def not_reduced(rank: int, world_size: int, way: Way) -> int:
    """Buckets that have not been reduced when a backward is over, in a step that the other rank follows."""
    params = [nn.Parameter(torch.ones(2000)) for _ in range(6)]
    optimizer = FusedShardedAdam(params, stage=3, bucket_cap_mb=0.001)
    flights, found = optimizer.inside.manager.flights, 0
    with optimizer.join():
        for _ in range(3 if rank == 0 else 1):
            torch.stack([param.sum() for param in params]).sum().backward()
            found = flights.num_launched - flights.num_reduced
            optimizer.step()
            optimizer.zero_grad()
    return found


def all_gradients_wait(way: Way) -> None:
    assert run_ranks(not_reduced, 2, way)[0] == 6


def scaled(rank: int, world_size: int, way: Way, stage: int) -> tuple[Tensor, Tensor | None]:
    param = nn.Parameter(torch.zeros(500, dtype=torch.bfloat16))
    optimizer = FusedShardedSGD([param], lr=1.0, stage=stage)
    local = gradients()[rank][:500].to(torch.bfloat16)
    (param * local).float().sum().backward()
    optimizer.mean_over(1.5)
    grad = None if param.grad is None or stage != 1 else param.grad.clone()
    optimizer.step()
    state = optimizer.full_state_dict(to=0).get("state", {})
    return state[0]["master"] if state else torch.empty(0), grad


def one_more_rounding(way: Way) -> None:
    (first, grad), (second, _) = (run_ranks(scaled, 2, way, stage)[0] for stage in (1, 2))
    mean = (sum(each[:500].to(torch.bfloat16).float() for each in gradients()[:2]) / 2).to(torch.bfloat16)
    assert grad is not None
    assert torch.equal(grad, mean * torch.tensor(2 / 3.0))
    torch.testing.assert_close(first, second, rtol=2**-8, atol=0)
    assert not torch.equal(first, second)


def no_sums_of_rows(way: Way) -> None:
    for accumulate_dtype in (None, torch.float32):
        table = nn.Embedding(8, 4, sparse=True, dtype=torch.float16)
        group = {"params": [table.weight], "sparse": True, "weight_decay": 0.0}
        optimizer = FusedShardedAdam([group], accumulate_dtype=accumulate_dtype)
        table(torch.tensor([1, 1, 5])).sum().backward()
        if accumulate_dtype is None:
            with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
                table(torch.tensor([5])).sum().backward()
        else:
            table(torch.tensor([5])).sum().backward()
            assert optimizer.full_grad(table.weight)[:, 0].tolist() == [0, 2, 0, 0, 0, 2, 0, 0]


TABLE = {"sparse": True, "weight_decay": 0.0}


def refusals_of_tables(rank: int, world_size: int) -> list[str]:
    """What is said of a table that fewer ranks have, and of stage 3 on a mesh; in other ways both train."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def groups() -> tuple[list[Any], dict[str, Any]]:
        return [nn.Parameter(torch.ones(4))], {"params": [nn.Parameter(torch.ones(4, 2))], **TABLE}

    dense, table = groups()
    FusedShardedAdam([{"params": dense, "process_group": mesh["shard"]}, table])
    dense, table = groups()
    FusedShardedAdam([{"params": dense}, table], process_group=mesh)
    said = []
    for of_table, options in (
        ({"process_group": mesh["shard"]}, {}),
        ({}, {"process_group": mesh, "stage": 3}),
    ):
        dense, table = groups()
        with pytest.raises(ValueError, match="sparse=True in param group 1 does not go") as raised:
            FusedShardedAdam([{"params": dense}, {**table, **of_table}], **options)  # type: ignore[arg-type]
        said.append(str(raised.value))
    return said


def no_tables_of_some_ranks(_: Way) -> None:
    for said, _ in run_ranks(refusals_of_tables, 4):
        assert "sparse=True in param group 1 does not go with a process_group of its own: rows are dealt among" in said


def no_tables_of_a_mesh_in_stage_3(_: Way) -> None:
    for _, said in run_ranks(refusals_of_tables, 4):
        assert "sparse=True in param group 1 does not go with stage=3 on a 2-D mesh" in said


NATIVE = some("exchange", '"native"')
JOINS = some("join", "inside")
SHOWN: dict[frozenset[Setting], Callable[[Way], None]] = {
    **each(some("master_weights", "None"), some("parameters", "bfloat16", "float16"), lost_updates),
    **each(some("state_dtype", "torch.bfloat16", '"8bit"'), some("parameters", "float64"), float64_moments),
    **each(NATIVE, some("parameters", "bfloat16", "float16"), sums_in_16_bits),
    **each(NATIVE, some("reduce_dtype", "torch.bfloat16", "torch.float16"), sums_in_16_bits),
    **each(NATIVE, some("bucket_cap_mb", "a number"), order_of_the_backend),
    **each(some("stage", "3"), some("overlap_gather", "called"), nothing_to_hide),
    **each(JOINS, some("optimizer", "ShardedOptimizer"), step_options_are_not_followed),
    **each(JOINS, some("stage", "3"), all_gradients_wait),
    **each(some("mean_over", "called"), some("stage", "1"), one_more_rounding),
    **each(some("parameters", "float16"), some(TABLES, "True"), no_sums_of_rows),
    **each(some(SUBGROUP, A_SUBGROUP), some(TABLES, "True"), no_tables_of_some_ranks),
    **each(some("process_group", "a 2-D mesh"), some(TABLES, "True"), no_tables_of_a_mesh_in_stage_3),
}


BUTS = [pair for pair in pairs_with(But) if not needs_accelerator(way_of(*pair) or {"device": "cuda"})]


@pytest.mark.parametrize("pair", BUTS, ids=name_of)
def test_a_but_is_what_the_table_says(pair: Pair) -> None:
    assert frozenset(pair) in SHOWN, "nothing shows it"
    way = way_of(*pair)
    assert way is not None
    SHOWN[frozenset(pair)](way)


def test_what_is_shown_is_in_the_table() -> None:
    assert set(SHOWN) == set(map(frozenset, BUTS))
