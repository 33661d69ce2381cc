"""A rank that dies while ranks follow each other: an error on all others, in time, that names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.mean.tokens import make_model, summed_loss, tokens
from tests.mortal_ranks import fail_now, start_ranks
from zerox import FusedShardedAdam
from zerox.optimizer import join

ROWS = 4
TIMEOUT_S = 5
SOON_S = 20  # until all others have their error after a death, on a busy machine


def train_and_die(rank: int, world_size: int, stage: int, dies: str) -> str:
    """Three ranks; 1 and 2 run out. One that follows, or the one that has batches left, is killed."""
    batches = (5, 2, 3)
    model = make_model()
    ours = FusedShardedAdam(model.parameters(), stage=stage)
    steps = iter(range(10))
    if rank == 1 and dies == "a follower":
        follow = join.Joining.follow

        def follow_once(self: join.Joining) -> object:
            if next(steps) == 1:
                fail_now(signal.SIGKILL)
            return follow(self)

        join.Joining.follow = follow_once  # type: ignore[method-assign, assignment]
    try:
        with ours.join():
            for step in range(batches[rank]):
                summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
                if rank == 0 and step == 4 and dies == "the last one with batches":
                    os.kill(os.getpid(), signal.SIGKILL)
                ours.clip_grad_norm_(1.0)
                ours.step()
                ours.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("dies", "dead"), [("a follower", 1), ("the last one with batches", 0)])
def test_the_others_name_the_rank_that_died(tmp_path: Path, dies: str, dead: int, stage: int) -> None:
    ranks = start_ranks(train_and_die, 3, stage, dies, folder=tmp_path / "ranks", timeout_s=TIMEOUT_S)
    try:
        for rank in {0, 1, 2} - {dead}:
            said = ranks.answer(rank, SOON_S)
            assert said is not None, f"rank {rank} hangs"
            assert f"rank {dead} " in said, said
    finally:
        ranks.close()
