"""On a mesh too, all ranks learn which one is gone, by its number among all: also those that never wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGKILL

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of
from tests.mortal_ranks import fail_now, start_ranks
from zerox import FusedShardedAdam

TIMEOUT_S = 20
DEAD = 1
SOON_S = 10


def train(rank: int, world_size: int, dies_in: str) -> tuple[float, str] | None:
    """Seconds until it raised, and what."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Chain(3)
    optimizer = FusedShardedAdam(model.parameters(), process_group=mesh, bucket_cap_mb=LAYER_CAP / 2**20)
    start = time.monotonic()
    try:
        for step in range(4):
            start = time.monotonic()
            if rank == DEAD and step == 1 and dies_in == "forward":
                fail_now(SIGKILL)
            model(input_of(rank)).square().sum().backward()
            if rank == DEAD and step == 1:
                fail_now(SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    return None


@pytest.mark.parametrize("dies_in", ["forward", "step"])
def test_all_ranks_name_the_one_that_died(dies_in: str, tmp_path: Path) -> None:
    run = start_ranks(train, 4, dies_in, timeout_s=TIMEOUT_S, folder=tmp_path / "run")
    try:
        for rank in {0, 1, 2, 3} - {DEAD}:
            answer = run.answer(rank, within_s=60)
            assert answer is not None
            seconds, message = answer
            assert message.startswith("zerox: ")
            assert f"rank {DEAD} is gone" in message, message
            assert seconds < SOON_S
    finally:
        run.close()
