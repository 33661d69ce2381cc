"""Optimizers of several groups of ranks: each is saved and loaded by its own ranks, without being told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.checkpoint.test_entries import STEPS, build, train
from tests.checkpoint.test_store import EXTRA, load_and_go_on, values
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import latest, load, save


def save_in_halves(rank: int, world_size: int, folder: str, only_first: bool) -> list[torch.Tensor]:
    """Two halves train two models. Each saves, loads and goes on by itself."""
    half = rank // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer = build("fp32", half, process_group=groups[half])
    train(model, optimizer, rank % 2, range(STEPS))
    optimizer.param_groups[0]["lr"] = 0.003
    path = f"{folder}/{half}"
    if half == 0 or not only_first:
        save(path, model, optimizer, extra=EXTRA)
        assert load(path, model, optimizer)["step"] == EXTRA["step"]
    train(model, optimizer, rank % 2, range(STEPS, 2 * STEPS))
    return values(model)


@pytest.mark.parametrize("only_first", [False, True])
def test_two_halves_of_the_ranks_save_at_once_or_only_one_does(tmp_path: Path, only_first: bool) -> None:
    ended = run_ranks(save_in_halves, 4, str(tmp_path), only_first)
    assert [(tmp_path / str(half)).exists() for half in range(2)] == [True, not only_first]
    assert latest(tmp_path) in (tmp_path / "0", tmp_path / "1")
    for half in range(1 if only_first else 2):
        went_on = run_ranks(load_and_go_on, 2, "fp32", str(tmp_path / str(half)), {})
        for ours, theirs in zip(went_on[0], ended[2 * half], strict=True):
            assert same_bits(ours, theirs)


def save_alone(rank: int, _: int, folder: str) -> int:
    """Each rank has an optimizer of its own; rank 1 does not save at all."""
    model, optimizer = build("fp32", rank, process_group="alone")
    if rank != 1:
        save(f"{folder}/{rank}", model, optimizer, extra=rank)
        return int(load(f"{folder}/{rank}", model, optimizer))
    return rank


def test_an_optimizer_alone_is_saved_alone(tmp_path: Path) -> None:
    assert run_ranks(save_alone, 3, str(tmp_path)) == [0, 1, 2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "2"]


def save_over_others(rank: int, world_size: int, folder: str) -> str:
    first = dist.new_group([0, 1])
    model, optimizer = build("fp32", 0)
    extra: Any = None
    if rank < 2:
        with pytest.raises(ValueError, match="process_group") as refused:
            save(f"{folder}/x", model, optimizer, process_group=first)
        extra = str(refused.value)
    save(f"{folder}/x", model, optimizer, extra=extra, process_group=DeviceMesh("cpu", list(range(world_size))))
    return str(load(f"{folder}/x", model, optimizer, process_group=dist.group.WORLD))


def test_a_group_without_all_of_the_optimizer_s_ranks_is_refused(tmp_path: Path) -> None:
    """It would save a part of the state. A mesh will do, as it does for the optimizer."""
    said = "process_group: ranks [2] have a part of the optimizer's state and are not in it"
    assert run_ranks(save_over_others, 3, str(tmp_path)) == [said] * 3
