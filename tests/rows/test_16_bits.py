"""Tables of 16 bits: their exact values are updated in float32, by gradients that are added up in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.rows.tables import NARROW, ROWS, WIDTH, Model, backward, build, mean_of, rounded
from tests.rows.test_sparse_adam import clip, train
from zerox import FusedShardedAdam, GradScaler


@pytest.mark.parametrize(
    ("kind", "world_size", "stage"),
    [
        *((kind, size, stage) for kind in ("bf16", "fp16") for size in (1, 2, 3) for stage in (1, 2, 3)[: size + 1]),
        *((kind, 2, stage) for kind in ("bf16, fp32", "bf16, none") for stage in (1, 3)),
    ],
)
def test_16_bit_tables_have_the_bits_of_sparse_adam_on_their_masters(kind: str, world_size: int, stage: int) -> None:
    """In float32, on the mean of gradients that were widened before they were added up."""
    dtype, options = NARROW[kind]
    run_ranks(train, world_size, stage, options, dtype)


@pytest.mark.parametrize(("kind", "stage"), [("bf16", 1), ("fp16", 2), ("bf16", 3)])
def test_norm_and_clipped_step_of_16_bit_tables_are_torch_s_in_float32(kind: str, stage: int) -> None:
    assert len(set(run_ranks(clip, 3, stage, 2.0, 0.01, kind))) == 1


def rows_of(rank: int, dtype: torch.dtype, step: int) -> Tensor:
    """Row 5 comes so often that sums in 16 bits would lose much of it."""
    numbers = torch.tensor([5] * 40 + [299, 64 + rank])
    values = torch.linspace(1, 1.9 + step, 42 * WIDTH).view(42, WIDTH).to(dtype)
    return torch.sparse_coo_tensor(numbers[None], values, (ROWS, WIDTH), check_invariants=False)


def written(rank: int, world_size: int, kind: str) -> None:
    """A row that is written between steps goes on from there, exactly; others from their masters."""
    dtype, options = NARROW[kind]
    options = {name: value for name, value in options.items() if name == "master_weights"}
    param = nn.Parameter(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).to(dtype))
    exact = nn.Parameter(param.detach().float())
    optimizer = FusedShardedAdam([{"params": [param], "sparse": True, "weight_decay": 0.0}], lr=0.01, **options)
    theirs = torch.optim.SparseAdam([exact], lr=0.01)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                param[5] = 0.375
                exact[5] = 0.375
            if kind == "bf16":  # a remainder stays, below what the parameter can hold: see csrc/math/rounding.h
                exact.data[5] = optimizer.full_state(param)["master"][5]
                assert torch.equal(rounded(exact.data, dtype, "auto")[5], param[5])
        param.grad = rows_of(rank, dtype, step)
        exact.grad = mean_of([rows_of(other, dtype, step) for other in range(world_size)], world_size)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        assert torch.equal(optimizer.full_state(param)["master"], exact)
        assert torch.equal(param, rounded(exact.data, dtype, options.get("master_weights", "auto")))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "bf16, fp32"])
def test_sums_are_in_float32_and_written_rows_count(kind: str) -> None:
    run_ranks(written, 2, kind)


def overflowing(rank: int, world_size: int, stage: int) -> None:
    """In float16 a scaler finds what one rank's rows have, and all ranks leave tables as they are."""
    dtype, options = NARROW["fp16"]
    model = Model().to(dtype)
    optimizer, scaler = build(model, stage=stage, **options), GradScaler(device="cpu", init_scale=4.0)
    table = optimizer.inside.tables[0]
    before = optimizer.full_state(table.param)
    backward(model, rank, 0)
    if rank == 1:
        assert model.words.weight.grad is not None
        model.words.weight.grad._values()[0, 0] = math.inf
    for scale in (2.0, 2.0):
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        now = optimizer.full_state(table.param)
        assert torch.equal(now["master"], before["master"]) is (int(now["step"]) == 0)
        (scale * model(torch.arange(60).view(20, 3))).backward()
    assert int(table.step) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_scaler_skips_steps_of_float16_tables(stage: int) -> None:
    run_ranks(overflowing, 2, stage)
