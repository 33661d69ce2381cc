"""On a mesh too, all ranks learn that one is gone, also those that never wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGKILL

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerox
from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of
from tests.mortal_ranks import fail_now, start_ranks
from zerox import FusedShardedAdam
from zerox.checkpoint.writer import CheckpointWriter

TIMEOUT_S = 20
DEAD = 1
SOON_S = 10


def train(rank: int, world_size: int, dies_in: str, stage: int) -> tuple[float, str] | None:
    """Seconds until it raised, and what."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Chain(3)
    optimizer = FusedShardedAdam(model.parameters(), process_group=mesh, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20)
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


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dies_in", ["forward", "step"])
def test_all_ranks_name_the_one_that_died(dies_in: str, stage: int, tmp_path: Path) -> None:
    run = start_ranks(train, 4, dies_in, stage, timeout_s=TIMEOUT_S, folder=tmp_path / "run")
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


def save(rank: int, world_size: int, path: str) -> tuple[float, str] | None:
    """Of tensor-parallel ranks: rank 3's data-parallel peer dies, and rank 0's tensor-parallel one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 6)), mesh["tp"], {"0": ColwiseParallel()})
    optimizer = FusedShardedAdam(model.named_parameters(), process_group=mesh["dp"])
    if rank == DEAD:
        CheckpointWriter.write_data = lambda *_: fail_now(SIGKILL)  # type: ignore[assignment, method-assign]
    start = time.monotonic()
    try:
        zerox.save(path, model, optimizer)
    except zerox.CheckpointError as error:
        return time.monotonic() - start, str(error)
    return None


def test_a_save_that_lacks_a_tensor_parallel_rank_fails_on_all(tmp_path: Path) -> None:
    run = start_ranks(save, 4, str(tmp_path / "x"), timeout_s=TIMEOUT_S, folder=tmp_path / "run")
    try:
        for rank in {0, 1, 2, 3} - {DEAD}:
            answer = run.answer(rank, within_s=60)
            assert answer is not None
            seconds, message = answer
            assert "x could not be saved: a rank did not answer" in message, message
            assert seconds < SOON_S
        assert not (tmp_path / "x").exists()
    finally:
        run.close()
