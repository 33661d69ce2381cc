"""A rank that dies inside ddp.join(): an error on all others, in time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.mortal_ranks import fail_now, start_ranks
from tests.wrapper.beside import data
from zerox import DistributedDataParallel, FusedShardedAdam
from zerox.wrapper.join import Following

TIMEOUT_S = 5
SOON_S = 25  # until all others have their error after a death, on a busy machine
BATCHES = (4, 1, 2)


def train_and_die(rank: int, world_size: int, holds: str, dies: str) -> str:
    """Of three ranks, 1 and 2 run out. One that follows, or the one that has batches left, is killed."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    adamw = torch.optim.AdamW(ddp.parameters()) if holds == "torch's" else FusedShardedAdam(ddp.parameters(), stage=1)
    forwards = iter(range(10))
    follow = Following.follow_forward

    def follow_once(self: Following) -> None:
        if next(forwards) == 1:
            fail_now(signal.SIGKILL)
        follow(self)

    if rank == 1 and dies == "a follower":
        Following.follow_forward = follow_once  # type: ignore[method-assign]
    try:
        with ddp.join():
            for step in range(BATCHES[rank]):
                ddp(data(rank, step)).exp().mean().backward()
                if rank == 0 and step == 3 and dies == "the last one with batches":
                    fail_now(signal.SIGKILL)
                adamw.step()
                adamw.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("holds", ["torch's", "ours"])
@pytest.mark.parametrize(("dies", "dead"), [("a follower", 1), ("the last one with batches", 0)])
def test_no_rank_hangs_where_one_dies_inside_join(tmp_path: Path, dies: str, dead: int, holds: str) -> None:
    ranks = start_ranks(train_and_die, 3, holds, dies, folder=tmp_path / "ranks", timeout_s=TIMEOUT_S)
    try:
        for rank in {0, 1, 2} - {dead}:
            said = ranks.answer(rank, SOON_S)
            assert said is not None, f"rank {rank} hangs"
            assert "did not answer" in said, said
    finally:
        ranks.close()
