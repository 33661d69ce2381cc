"""A rank that dies while masks change: the others raise and name it, and no checkpoint is hurt."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import zerox
from tests.mortal_ranks import fail_now, start_ranks
from tests.sparsity.trained import Case, batch, model, optimizer_of
from zerox.params.params import ParamGather
from zerox.residency.residency import Residency
from zerox.sparsity import choose

TIMEOUT_S = 20
SOON_S = 60  # until all others have their error after a death, on a busy machine
DEAD = 1
CASE = Case(targets={"*.weight": 0.7}, schedule=("cubic", 1, 9, 1))
# What the victim is about to do.
MOMENTS: dict[str, tuple[Any, str]] = {
    "limits": (choose, "kth_smallest"),
    "publishing": (ParamGather, "start"),
    "publishing, sharded": (Residency, "start"),
}


def train(rank: int, world: int, moment: str, stage: int, folder: Path) -> str:
    module = model()
    optimizer = optimizer_of(CASE, module, stage=stage, bucket_cap_mb=0.01)
    sparsity = CASE.sparsity(optimizer)
    try:
        for step in range(4):
            module(batch(rank, world, step, torch.float32)).square().mean().backward()
            optimizer.step()
            if step == 2:
                zerox.save(folder, module, optimizer)
                if rank == DEAD:
                    setattr(*MOMENTS[moment], lambda *_, **__: fail_now(signal.SIGKILL))
            sparsity.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("moment", "stage"), [("limits", 1), ("publishing", 2), ("publishing, sharded", 3)])
def test_the_others_name_the_rank_that_died(tmp_path: Path, moment: str, stage: int) -> None:
    ranks = start_ranks(train, 3, moment, stage, tmp_path / "x", folder=tmp_path / "ranks", timeout_s=TIMEOUT_S)
    try:
        answers = [ranks.answer(rank, SOON_S) for rank in range(3) if rank != DEAD]
    finally:
        ranks.close()
    for said in answers:
        assert said is not None, "a rank hangs"
        assert said.startswith("zerox: "), said
        assert f"rank {DEAD} " in said, said
    module = model()
    optimizer = optimizer_of(CASE, module)
    sparsity = CASE.sparsity(optimizer)
    zerox.load(tmp_path / "x", module, optimizer)
    for name, kept in sparsity.masks().items():
        assert not kept.all()
        assert not module.get_parameter(name)[~kept].any()
