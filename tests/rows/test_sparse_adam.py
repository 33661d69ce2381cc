"""Tables train as torch.optim.SparseAdam on the mean of the ranks' gradients, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.rows.tables import NARROW, ROWS, WIDTH, Model, Twin, backward, build, ids_of, mean_of
from zerox import FusedShardedAdam, GradScaler, sparse_params

STEPS = 5


def train(
    rank: int,
    world_size: int,
    stage: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    model = Model(seed=rank).to(device, dtype)  # rank 0's values are everybody's
    optimizer = build(model, stage=stage, **options)
    twin = Twin(model, world_size, **options)
    for step in range(STEPS):
        twin.copy_dense(model)
        twin.take_gradients(step)
        backward(model, rank, step)
        if step == 4:
            optimizer.synchronize()
        optimizer.step()
        twin.step()
        for ours, theirs in zip(sparse_params(model), twin.tables, strict=True):
            if stage == 1 and theirs.grad is not None:
                assert ours.grad is not None
                assert torch.equal(ours.grad.coalesce().indices(), theirs.grad.coalesce().indices())
                assert torch.equal(ours.grad.coalesce().values(), theirs.grad.coalesce().values().to(ours.grad.dtype))
        optimizer.zero_grad()
        assert all(param.grad is None for param in sparse_params(model))
        twin.check(optimizer, model)


@pytest.mark.parametrize(
    ("world_size", "stage"), [*((size, stage) for size in (1, 2, 3, 4) for stage in (1, 2)), (2, 3), (3, 3), (4, 3)]
)
def test_training_has_the_bits_of_sparse_adam_on_the_mean(world_size: int, stage: int) -> None:
    run_ranks(train, world_size, stage, {})


def train_with_many(rank: int, world_size: int) -> None:
    """As if tables and ranks were so many that what ranks must know takes a message of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerox.rows.rows.MOST_PIGGYBACKED", 0)
        train(rank, world_size, 2, {})


def test_many_tables_on_many_ranks_need_a_message_more() -> None:
    run_ranks(train_with_many, 3)


def test_maximize_is_torch_s() -> None:
    run_ranks(train, 2, 2, {"maximize": True})


def as_dense(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad.to_dense()


def clip(
    rank: int, world_size: int, stage: int, norm_type: float, max_norm: float, kind: str = "", device: str = "cpu"
) -> float:
    dtype, options = NARROW.get(kind, (torch.float32, {}))
    model = Model().to(device, dtype)
    optimizer = build(model, stage=stage, **options)
    twin = Twin(model, world_size, **options)
    norms = []
    for step in range(3):
        twin.copy_dense(model)
        twin.take_gradients(step)
        model.head.requires_grad_(False)  # the norm is of the tables then
        backward(model, rank, step)
        grads = [param.grad for param in twin.tables]
        dense = [nn.Parameter(torch.zeros_like(param)) for param in twin.tables]
        for param, grad in zip(dense, grads, strict=True):
            param.grad = as_dense(grad, param)
        expected = nn.utils.clip_grad_norm_(dense, max_norm, norm_type)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        torch.testing.assert_close(norm, expected)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            if grad is not None:
                grad._values().mul_(coefficient)
        optimizer.step()
        twin.step()
        optimizer.zero_grad()
        twin.check(optimizer, model)
        norms.append(float(norm))
    return sum(norms)


@pytest.mark.parametrize(
    ("stage", "norm_type", "max_norm"),
    [
        *((stage, *norm) for stage in (1, 2) for norm in ((2.0, 0.01), (2.0, 1e6), (1.0, 0.5), (math.inf, 0.01))),
        (3, 2.0, 0.01),
    ],
)
def test_norm_and_clipped_step_are_torch_s_on_dense_gradients(stage: int, norm_type: float, max_norm: float) -> None:
    found = [run_ranks(clip, world_size, stage, norm_type, max_norm) for world_size in (1, 3)]
    assert all(len(set(norms)) == 1 for norms in found), "all ranks see the same norm, to the bit"


def norm_over_both(rank: int, world_size: int) -> None:
    model, twin = Model(), Model()
    optimizer = build(model)
    backward(model, rank, 0)
    of_ranks = []
    for other in range(world_size):
        twin.zero_grad()
        backward(twin, other, 0)
        of_ranks.append(
            [as_dense(p.grad, p) if p.grad is None or p.grad.is_sparse else p.grad for p in twin.parameters()]
        )
    for param, grads in zip(twin.parameters(), zip(*of_ranks, strict=True), strict=True):
        param.grad = torch.stack(grads).sum(0) / world_size
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(twin.parameters(), 1.0))


def test_the_norm_is_over_dense_gradients_and_rows() -> None:
    run_ranks(norm_over_both, 2)


def handmade(rank: int, world_size: int, make: Callable[[int], Tensor | None]) -> None:
    """Gradients put into p.grad, one step beside SparseAdam."""
    param = nn.Parameter(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH))
    twin = nn.Parameter(param.detach().clone())
    optimizer = FusedShardedAdam([{"params": [param], "sparse": True, "weight_decay": 0.0}], lr=0.1)
    theirs = torch.optim.SparseAdam([twin], lr=0.1)
    for _ in range(3):
        param.grad = make(rank)
        twin.grad = mean_of([make(other) for other in range(world_size)], world_size)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        assert torch.equal(param, twin)
    state = optimizer.full_state_dict().get("state", {})
    if state and (kept := theirs.state[twin]):
        assert torch.equal(state[0]["exp_avg"], kept["exp_avg"])
        assert torch.equal(state[0]["exp_avg_sq"], kept["exp_avg_sq"])
        assert float(state[0]["step"]) == kept["step"]


def sparse(rows: list[int], values: list[float]) -> Tensor:
    filled = torch.tensor(values)[:, None].expand(-1, WIDTH)
    return torch.sparse_coo_tensor(torch.tensor([rows]).long(), filled, (ROWS, WIDTH), check_invariants=False)


def cancelling(rank: int) -> Tensor:
    return sparse([5, 5, 299, 7], [1.0, -1.0, (-1.0) ** rank, 0.25])


def empty(rank: int) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty(1, 0).long(), torch.empty(0, WIDTH), (ROWS, WIDTH), check_invariants=False
    )


def on_one_rank(rank: int) -> Tensor | None:
    return sparse([250, 1, 250], [0.5, 3.0, 0.125]) if rank == 1 else None


def everywhere(rank: int) -> Tensor:
    """Rows and numbers of all the table: rows are named by bits."""
    return sparse(
        [*range(ROWS), *range(rank, ROWS, 3)],
        [(7 * n + rank) % 11 - 5.0 for n in range(len(range(rank, ROWS, 3)) + ROWS)],
    )


def unsorted(rank: int) -> Tensor:
    """Said to be coalesced, and not in order."""
    grad = sparse([250, 3, 64 + rank, 299], [1.0, 2.0, -0.5, 0.25])
    return grad._coalesced_(True)


@pytest.mark.parametrize("make", [cancelling, empty, on_one_rank, everywhere, unsorted], ids=lambda make: make.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_that_cancel_or_are_absent_count_as_in_torch(world_size: int, make: Callable[[int], Tensor]) -> None:
    run_ranks(handmade, world_size, make)


def nonfinite(rank: int, world_size: int, stage: int, value: float) -> None:
    model = Model()
    optimizer, scaler = build(model, stage=stage), GradScaler(device="cpu", init_scale=4.0)
    before = [param.detach().clone() for param in model.parameters()]
    backward(model, rank, 0)
    if rank == world_size - 1:
        assert model.words.weight.grad is not None
        model.words.weight.grad._values()[0, 0] = value
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    backward(model, rank, 0)
    if rank == 0:
        assert model.words.weight.grad is not None
        model.words.weight.grad._values()[0, 0] = value
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.step()
    assert not model.words.weight.isfinite().all(), "as a dense gradient, it comes through"


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_not_finite_does_what_it_does_in_dense_gradients(stage: int, value: float) -> None:
    run_ranks(nonfinite, 2, stage, value)


def scaled(rank: int, world_size: int, stage: int, how: str) -> Tensor:
    model = Model()
    optimizer = build(model, stage=stage)
    scale = 4.0 if how else 1.0
    (scale * model(ids_of(rank, 0))).backward()
    if how == "unscale":
        optimizer.unscale_grads_(torch.tensor(0.25))
    elif how == "scale_grads_":
        optimizer.scale_grads_(0.25)
    elif how == "mean_over":
        optimizer.mean_over(4.0)
    optimizer.step()
    return model.words.weight.detach().clone()


@pytest.mark.parametrize(
    ("stage", "how"),
    [*((stage, how) for stage in (1, 2) for how in ("unscale", "scale_grads_", "mean_over")), (3, "unscale")],
)
def test_scales_reach_rows(stage: int, how: str) -> None:
    """By powers of two, which change no bit."""
    assert torch.equal(run_ranks(scaled, 2, stage, how)[0], run_ranks(scaled, 2, 2, "")[0])


def skipped(rank: int, world_size: int, stage: int) -> None:
    model = Model()
    optimizer = build(model, stage=stage)
    before = model.words.weight.detach().clone()
    backward(model, rank, 0)
    if rank == 0:
        assert model.words.weight.grad is not None
        model.words.weight.grad._values()[0, 0] = math.inf
    assert float(optimizer.unscale_grads_(None)) == 1.0
    optimizer.step()
    assert torch.equal(model.words.weight, before)
    assert not any(int(table.step) for table in optimizer.inside.tables)
    optimizer.zero_grad()
    backward(model, rank, 0)
    optimizer.step()
    assert not torch.equal(model.words.weight, before)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_is_skipped_leaves_tables_alone(stage: int) -> None:
    run_ranks(skipped, 2, stage)


def value_clipped(rank: int, world_size: int) -> None:
    model = Model()
    optimizer, twin = build(model), Twin(model, world_size)
    twin.take_gradients(0)
    backward(model, rank, 0)
    optimizer.clip_grad_value_(0.01)
    optimizer.step()
    for param in twin.tables:
        assert param.grad is not None
        param.grad._values().clamp_(-0.01, 0.01)
    twin.step()
    twin.check(optimizer, model)


def test_values_are_clipped() -> None:
    run_ranks(value_clipped, 2)


def added_after_clip(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.ones(ROWS, WIDTH))
    optimizer = FusedShardedAdam([{"params": [param], "sparse": True, "weight_decay": 0.0}])
    param.grad = cancelling(rank)
    optimizer.clip_grad_norm_(0.1)
    if rank == 0:
        param.grad.add_(cancelling(rank))
    with pytest.raises(RuntimeError, match="gradients were added between"):
        optimizer.step()
    optimizer.zero_grad()
    param.grad = cancelling(rank)
    optimizer.step()


def test_gradients_added_after_a_clip_are_refused_on_all_ranks() -> None:
    run_ranks(added_after_clip, 2)
