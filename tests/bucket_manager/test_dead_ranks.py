"""A rank that is gone is an error on the others, in time, that names what they wait for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.bucket_manager.rig import message_of
from tests.bucket_manager.training import Training
from tests.ranks import Pool, RankFailed


def dies_in_backward(rank: int, _: int, how: str, folder: str) -> None:
    training = Training(rank, stage=2)
    training.backward(0)
    training.optimizer.step()
    training.optimizer.zero_grad()
    if rank == 2:
        if how == "exits":
            os._exit(7)
        # Some buckets leave, then backward is killed or stalls; the hook is in the layer whose gradients are third.
        training.fail = lambda _: os.kill(os.getpid(), signal.SIGKILL) if how == "is killed" else time.sleep(10)
        training.backward(1, fail_in=1)
        os._exit(7)
    start = time.monotonic()
    message = message_of(lambda: (training.backward(1), training.optimizer.step()))
    Path(folder, f"rank {rank}").write_text(f"{time.monotonic() - start}\n{message}")
    os._exit(0)  # the group can't be destroyed in order any more


@pytest.mark.parametrize("how", ["exits", "is killed", "stalls"])
def test_a_rank_that_is_gone_is_an_error_on_the_others_that_names_what_they_await(how: str, tmp_path: Path) -> None:
    timeout_s = 4
    pool = Pool()
    with pytest.raises(RankFailed):
        pool.run(dies_in_backward, 3, how, str(tmp_path), timeout_s=timeout_s)
    pool.close()
    for rank in (0, 1):
        seconds, _, message = (tmp_path / f"rank {rank}").read_text().partition("\n")
        assert float(seconds) < 3 * timeout_s
        assert "bucket " in message
        assert "layers." in message
