"""Ranks that are killed while they save weights: readers find the old ones or the new ones, and the others say why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.test_deaths import answers_of_others, die
from tests.checkpoint.test_killed import LONGEST_S, be_a_rank, last_said, later, saving
from tests.checkpoint.test_weight_folder import CONFIG, MANY, Small, others_in, put, value_in, with_config
from zerox import CheckpointError, FusedShardedAdam, save_weights
from zerox.checkpoint import weight_saving
from zerox.checkpoint.weight_folder import WeightTarget
from zerox.plan.weight_split import ONE

NUM_KILLS = 30


def save_for_ever(rank: int, world_size: int, folder: str, first: int, said: Any) -> None:
    be_a_rank(rank, world_size, folder)
    model = Small(float(first))
    optimizer = FusedShardedAdam(model.named_parameters())
    for count in range(first, first + 1000):
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                each.fill_(count)
        if rank == 0:
            said.send(count)
        save_weights(optimizer, f"{folder}/x", MANY if count % 2 else "5GB")


@pytest.mark.parametrize(("world_size", "victim", "num_kills"), [(1, 0, NUM_KILLS), (2, 0, 3), (2, 1, 3)])
def test_kills_leave_the_weights_from_before_or_the_new_ones(
    tmp_path: Path, world_size: int, victim: int, num_kills: int
) -> None:
    rng = random.Random(world_size + victim)
    with_config(tmp_path / "x", 0.0)
    kept = 0
    for _ in range(num_kills):
        with saving(world_size, tmp_path, kept, save_for_ever) as (processes, heard):
            count = last_said(heard)
            time.sleep(rng.random() * 0.02)
            os.kill(processes[victim].pid, signal.SIGKILL)
            for process in processes:
                process.join(LONGEST_S)
            assert [each.exitcode for i, each in enumerate(processes) if i != victim] == [1] * (world_size - 1)
            with contextlib.suppress(EOFError):
                count = later(heard, count)
        kept = int(value_in(tmp_path / "x"))
        assert kept in (count - 1, count), "what was saved before, or what was being saved"
        assert others_in(tmp_path / "x") == {"config.json": CONFIG.encode(), "tokenizer.json": "config.json"}
    put(tmp_path / "x", 5000.0)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


# What the victim is about to do.
MOMENTS: dict[str, tuple[Any, str]] = {
    "names": (weight_saving, "model_of"),
    "plan": (weight_saving, "agree"),
    "files": (weight_saving, "make_files"),  # rank 0 alone
    "data": (weight_saving, "write_parts"),
    "put": (WeightTarget, "put"),  # rank 0 alone
}


def saves(rank: int, _: int, path: str, moment: str, victim: int) -> tuple[str, str]:
    model = nn.Linear(60, 80)
    optimizer = FusedShardedAdam(model.named_parameters())
    if rank == victim:
        if moment == "before":
            die()
        setattr(*MOMENTS[moment], die)
    try:
        save_weights(optimizer, path)
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("moment", "victim"),
    [("before", 1), ("names", 1), ("plan", 0), ("files", 0), ("data", 0), ("data", 1), ("put", 0)],
)
def test_the_others_raise_checkpoint_error_with_the_path(tmp_path: Path, moment: str, victim: int) -> None:
    path = with_config(tmp_path / "x")
    for kind, said in answers_of_others(tmp_path, saves, victim, str(path), moment, victim):
        assert kind == CheckpointError.__name__, said
        assert said.startswith(f"zerox: weights could not be saved to {path}"), said
        assert "did not answer" in said
    assert value_in(path) == 1.0
    save_weights(FusedShardedAdam((model := nn.Linear(3, 2)).named_parameters()), path)
    assert torch.equal(load_file(path / ONE)["weight"], model.weight)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ranks", "x"]
