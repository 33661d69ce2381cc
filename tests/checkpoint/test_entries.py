"""The optimizer's state in a checkpoint: the same whole tensors whoever saved them, and training goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS, Mixed, backward, batch, make_model, make_optimizer
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.checkpoint.entries import entries
from zerox.checkpoint.names import OPTIMIZER, parameter_names

STEPS = 2
# Rank 0 saves alone what all have.
MODEL = "model."


def build(kind: str, seed: int, **options: Any) -> tuple[Mixed, FusedShardedAdam]:
    dtype, own = KINDS[kind]
    model = make_model(dtype, seed)
    return model, make_optimizer(model.named_parameters(), lr=1e-2, **{"bucket_cap_mb": 0.05, **own, **options})


def train(model: Mixed, optimizer: FusedShardedAdam, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, batch(rank, step, dtype=next(model.parameters()).dtype), branch=step == 1)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def checkpoint_of(model: Mixed, optimizer: FusedShardedAdam) -> dict[str, Tensor]:
    return {**{MODEL + name: param.data for name, param in model.named_parameters()}, **state_of(model, optimizer)}


def state_of(model: Mixed, optimizer: FusedShardedAdam) -> dict[str, Tensor]:
    found = entries(optimizer, parameter_names(model, optimizer))
    return {name.removeprefix(OPTIMIZER): tensor for name, tensor in found.items()}


def save(rank: int, _: int, kind: str, path: str, options: dict[str, Any]) -> list[Tensor]:
    """Saves in the middle of a training, and returns how it ends."""
    model, optimizer = build(kind, 0, **options)
    train(model, optimizer, rank, range(STEPS))
    dcp.save(checkpoint_of(model, optimizer), checkpoint_id=path)
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return [p.detach().clone() for p in model.parameters()]


def load(rank: int, _: int, kind: str, path: str, again: str, options: dict[str, Any]) -> list[Tensor]:
    """Loads into another start, saves again, and goes on."""
    model, optimizer = build(kind, 1, **options)
    dcp.load(checkpoint_of(model, optimizer), checkpoint_id=path)
    dcp.save(checkpoint_of(model, optimizer), checkpoint_id=again)
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return [p.detach().clone() for p in model.parameters()]


def whole(path: Path) -> dict[str, Tensor]:
    dcp_to_torch_save(path, path.with_suffix(".pt"))
    found: dict[str, Tensor] = torch.load(path.with_suffix(".pt"), weights_only=True)
    return found


CHANGES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {}),
    (2, 2, {}),
    (3, 3, {"stage": 1}),
    (1, 3, {}),
    (2, 4, {"stage": 1}),
    (3, 2, {"bucket_cap_mb": 1.0}),
    (4, 1, {"bucket_cap_mb": 0.01}),
]


# Each kind at the same number of ranks and with two of the changes, and each change with several kinds.
PAIRS = [
    (kind, *change)
    for i, kind in enumerate(KINDS)
    for j, change in enumerate(CHANGES)
    if j == 1 or (i + j) % len(CHANGES) in (0, 3)
]


@pytest.mark.parametrize(("kind", "saved_by", "loaded_by", "options"), PAIRS, ids=str)
def test_any_ranks_load_what_others_saved(
    tmp_path: Path, kind: str, saved_by: int, loaded_by: int, options: dict[str, Any]
) -> None:
    same = saved_by == loaded_by
    first, second = tmp_path / "first", tmp_path / "second"
    ended = run_ranks(save, saved_by, kind, str(first), options if same else {})
    went_on = run_ranks(load, loaded_by, kind, str(first), str(second), options)
    before, after = whole(first), whole(second)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert same_bits(tensor, after[name]), name
    if same:
        for ours, theirs in zip(went_on[0], ended[0], strict=True):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("kind", ["bf16 remainder, 8-bit moments", "amsgrad"])
def test_a_checkpoint_has_each_parameter_whole_in_its_own_dtype(tmp_path: Path, kind: str) -> None:
    run_ranks(save, 3, kind, str(tmp_path / "x"), {})
    found = whole(tmp_path / "x")
    eight_bit = "8-bit" in kind
    for name, param in make_model(KINDS[kind][0]).named_parameters():
        coded = eight_bit and param.numel() >= 4096
        assert found[f"{name}.step"].dtype is torch.int64
        assert int(found[f"{name}.step"]) == (0 if "unused" in name else 1 if "branch" in name else STEPS)
        assert found[f"{name}.exp_avg"].shape == param.shape
        assert found[f"{name}.exp_avg"].dtype is (torch.uint8 if coded else torch.float32)
        assert (f"{name}.exp_avg_scale" in found) == coded
        if coded:
            assert found[f"{name}.exp_avg_scale"].shape == (-(-param.numel() // 256),)
        assert (f"{name}.max_exp_avg_sq" in found) == (kind == "amsgrad")
        if eight_bit:
            assert found[f"{name}.remainder"].dtype is torch.int16
            assert found[f"{name}.remainder"].shape == param.shape
