"""Tables beside everything else: memory, groups that come later, freezing, hidden gathers, hooks on versions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from tests.rows.tables import Model, backward, build, ids_of
from zerox import FusedShardedAdam, sparse_params


def memory(rank: int, size: int, stage: int, dtype: torch.dtype) -> None:
    table, head = nn.Embedding(1000, 16, sparse=True, dtype=dtype), nn.Linear(16, 300, dtype=dtype)
    groups = [{"params": head.parameters()}, {"params": table.parameters(), "sparse": True, "weight_decay": 0.0}]
    optimizer = FusedShardedAdam(groups, stage=stage)
    head(table(torch.tensor([1, 1, 700]))).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    found, expected = optimizer.memory_bytes(), zerox.estimate(groups, size, stage=stage)
    dense = zerox.estimate(head.parameters(), size, stage=stage)
    owners = optimizer.inside.tables[0].owners
    own = len(owners.rows_of(rank)) * 16
    most = max(len(owners.rows_of(each)) for each in range(size)) * 16
    master = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}[dtype]
    assert found.parameters == expected.parameters == dense.parameters + 1000 * 16 * dtype.itemsize
    assert found.moments == dense.moments + 2 * 4 * own
    assert found.master == dense.master + master * own
    for of_estimate, of_dense, each in (
        (expected.moments, dense.moments, 2 * 4),
        (expected.master, dense.master, master),
    ):
        assert 0 <= of_estimate - (of_dense + each * most) <= each * 63 * 16, "as if the last block were whole"
    assert 0 < found.gradients - dense.gradients < 2000, "a few rows"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16), (2, torch.float16)]
)
def test_memory_and_its_estimate_know_tables(size: int, stage: int, dtype: torch.dtype) -> None:
    run_ranks(memory, size, stage, dtype)


def alike(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def later(rank: int, size: int, how: str, stage: int) -> None:
    """A table that comes later trains as one that was there, once its steps begin."""
    model, twin = Model(), Model()
    theirs = build(twin)
    options = {"lr": 0.05, "betas": (0.875, 0.99), "eps": 1e-6, "stage": stage}
    if how == "a group that is added":
        optimizer = FusedShardedAdam(model.head.parameters(), **options)
        optimizer.add_param_group({"params": sparse_params(model), "sparse": True, "weight_decay": 0.0})
    else:
        for param in sparse_params(model):
            param.requires_grad_(False)
        optimizer = build(model, stage=stage)
        assert not optimizer.inside.tables
        for param in sparse_params(model):
            param.requires_grad_(True)
    for step in range(3):
        for each, of in ((model, optimizer), (twin, theirs)):
            backward(each, rank, step)
            of.step()
            of.zero_grad()
        alike(model, twin)
    assert len(optimizer.inside.tables) == 3


@pytest.mark.parametrize("how", ["a group that is added", "unfrozen"])
@pytest.mark.parametrize("stage", [2, 3])
def test_tables_may_come_later(how: str, stage: int) -> None:
    run_ranks(later, 2, how, stage)


def hidden(rank: int, size: int) -> None:
    model, twin = Model(), Model()
    optimizer, theirs = build(model), build(twin)
    optimizer.overlap_gather(model)
    for step in range(4):
        for each, of in ((model, optimizer), (twin, theirs)):
            backward(each, rank, step)
            of.clip_grad_norm_(1.0)
            of.step()
            of.zero_grad()
    optimizer.synchronize()
    alike(model, twin)


def test_hidden_gathers_change_no_bit() -> None:
    run_ranks(hidden, 2)


def not_alone(rank: int, size: int, stage: int) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = FusedShardedAdam([{"params": model.parameters(), "sparse": True, "weight_decay": 0.0}], stage=stage)
    with optimizer.no_sync():
        model(ids_of(rank, 0) % 10).sum().backward()
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert model.weight.grad._nnz() == 0
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before), "a gradient of no rows"
    assert int(optimizer.inside.tables[0].step) == 2, "is one, as in torch"
    optimizer.zero_grad()
    optimizer.step()
    assert int(optimizer.inside.tables[0].step) == 2, "no gradient is none"


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_may_have_tables_only(stage: int) -> None:
    run_ranks(not_alone, 2, stage)


def test_a_backward_through_old_values_raises() -> None:
    table = nn.Parameter(torch.ones(5, 3))
    optimizer = FusedShardedAdam([{"params": [table], "sparse": True, "weight_decay": 0.0}])
    loss = (table * table).sum()
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (5, 3))
    optimizer.step()
    table.grad = None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_scheduler_s_rate_is_used() -> None:
    table, twin = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(5, 3))
    optimizer = FusedShardedAdam([{"params": [table], "sparse": True, "weight_decay": 0.0}], lr=torch.tensor(0.1))
    theirs = torch.optim.SparseAdam([twin], lr=torch.tensor(0.1))
    for each, param in ((optimizer, table), (theirs, twin)):
        scheduler = torch.optim.lr_scheduler.StepLR(each, 1, 0.5)
        for _ in range(3):
            param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (5, 3))
            each.step()
            scheduler.step()
    assert torch.equal(table, twin)
