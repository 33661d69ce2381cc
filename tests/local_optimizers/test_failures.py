"""A class that raises in step() on one rank: all ranks raise, and no parameter has changed on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.kernels.shards import same_bits
from tests.local_optimizers.classes import Failing
from tests.optimizer.models import backward, batch, make_model
from tests.ranks import run_ranks
from zerox import ShardedOptimizer


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def says(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail(
    rank: int, world_size: int, who: int, dtype: torch.dtype, masters: str | None, folder: str, stage: int = 2
) -> tuple[list[str], list[bool]]:
    """What each step says, and whether parameters were as they had to be."""
    model = make_model(dtype)

    def build() -> ShardedOptimizer:
        options = {"lr": 0.1, "momentum": 0.9, "bucket_cap_mb": 0.03, "master_weights": masters, "elementwise": True}
        return ShardedOptimizer(model.named_parameters(), Failing, stage=stage, **options)  # type: ignore[arg-type]

    ours = build()
    backward(model, batch(rank, 0, dtype=dtype))
    ours.step()
    ours.zero_grad()
    zerox.save(Path(folder) / "x", model, ours)
    after_one = values(model)
    backward(model, batch(rank, 1, dtype=dtype))
    said = [says(lambda: ours.step(fails=rank == who))]
    as_before = [all(map(same_bits, values(model), after_one))]
    said.append(says(ours.step))
    ours.zero_grad()
    backward(model, batch(rank, 1, dtype=dtype))
    said.append(says(ours.step))
    as_before.append(all(map(same_bits, values(model), after_one)))
    ours.zero_grad()
    refused = says(lambda: zerox.save(Path(folder) / "y", model, ours))
    zerox.load(Path(folder) / "x", model, ours)
    backward(model, batch(rank, 1, dtype=dtype))
    said.append(says(ours.step))
    went_on = values(model)
    del ours
    ours = build()
    zerox.load(Path(folder) / "x", model, ours)
    backward(model, batch(rank, 1, dtype=dtype))
    ours.step()
    as_before.append(all(map(same_bits, values(model), went_on)))
    return [*said, refused], as_before


@pytest.mark.parametrize(
    ("world_size", "who", "dtype", "masters", "stage"),
    [
        (2, 0, torch.float32, "auto", 2),
        (2, 1, torch.float32, "auto", 3),  # in the first of several buckets, none of which is whole anywhere
        (3, 1, torch.float64, "auto", 2),
        (3, 2, torch.bfloat16, "auto", 2),
        (2, 1, torch.bfloat16, None, 2),
    ],
    ids=str,
)
def test_all_ranks_raise_and_all_parameters_are_as_before(
    world_size: int, who: int, dtype: torch.dtype, masters: str | None, stage: int, tmp_path: Path
) -> None:
    for said, as_before in run_ranks(fail, world_size, who, dtype, masters, str(tmp_path), stage):
        name = "tests.local_optimizers.classes.Failing"
        failed = f"RuntimeError: rank {who} raised ArithmeticError: this rank can't in {name}'s step()"
        assert said[0].startswith(failed)
        assert said[0].endswith("all parameters are as before")
        for again in said[1:3]:
            assert again.startswith(f"RuntimeError: zerox: {name} raised in step() on rank {who}"), again
            assert again.endswith("Load the last state that was saved, on all ranks")
        assert said[3] == "no error"
        assert said[4].startswith("CheckpointError: "), said[4]
        assert f"{name} raised in step() on rank {who}" in said[4]
        assert as_before == [True, True, True]


def test_alone_the_class_s_own_error_comes_through_and_training_may_go_on() -> None:
    param = nn.Parameter(torch.ones(300))
    ours = ShardedOptimizer([param], Failing, lr=0.1)
    param.grad = torch.ones(300)
    with pytest.raises(ArithmeticError, match="this rank can't"):
        ours.step(fails=True)
    ours.step()


def one_small_parameter(rank: int, world_size: int) -> tuple[list[str], Tensor]:
    """Only rank 0 has a part of it."""
    param = nn.Parameter(torch.arange(17.0))
    ours = ShardedOptimizer([param], Failing, lr=0.1, momentum=0.9)
    param.grad = torch.full((17,), float(rank))
    ours.step()
    said = [says(lambda: ours.step(fails=rank > 0)), says(lambda: ours.step(fails=rank == 0))]
    return said, param.detach()


def test_a_rank_without_segments_takes_part_and_has_nothing_to_fail_at() -> None:
    for said, param in run_ranks(one_small_parameter, 3):
        assert said[0] == "no error"
        assert "rank 0 raised ArithmeticError" in said[1]
        torch.testing.assert_close(param, torch.arange(17.0) - 0.1 - 0.1 * 1.9)
