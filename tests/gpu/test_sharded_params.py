"""Sharded parameters (stage=3) of two processes on one GPU, over gloo: they read each other's shards in its memory."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import MIB, Scales, batch_of, cpu_copies, scribble, sleep
from tests.gpu.processes import run_processes
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

NUMEL = 50_000
BUCKET_MB = NUMEL * 4 / MIB
LATE = 40_000_000  # cycles: some 20 ms
LIMITS = {"two buckets": 2.1 * BUCKET_MB, "inf": float("inf")}


def trained(rank: int, device: torch.device, stage: int, limit: str = "inf") -> tuple[list[Tensor], int, int]:
    """Parameters, and the bytes of this rank's shards and of their copies in the host's memory. Devices are late."""
    model = Scales(numel=NUMEL).to(device)
    options = {"resident_mb": LIMITS[limit]} if stage == 3 else {}
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=BUCKET_MB, **options)
    for step in range(6):
        y = model(batch_of(rank, step, NUMEL).to(device))
        sleep(device, LATE if step % 2 == rank else 0)  # reads of parameters come late
        (y * y).sum().backward()
        sleep(device, LATE if step % 3 == rank else 0)  # and so does the update
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                model.weights[1].mul_(0.5)
        if step == 3:
            model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
        if step == 4:
            with optimizer.whole(), torch.no_grad():
                model.weights[0].add_(1)
    shards = copies = 0
    if stage == 3:
        gather = optimizer.inside.gather
        shards, copies = sum(each.buffer.own.nbytes for each in gather.all), gather.residents.served_bytes
    del optimizer
    scribble(device, NUMEL, 8)
    return cpu_copies(model.parameters()), shards, copies


def trainings(rank: int, _: int, name: str) -> None:
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    expected, *_ = trained(rank, device, 2)
    for switch in ("auto", "0", "auto"):
        for limit in LIMITS:
            with patch.dict(os.environ, {"ZEROX_DEVICE_READS": switch}), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                params, shards, copies = trained(rank, device, 3, limit)
            said = [str(each.message) for each in caught]  # why not, if it can't
            assert all(same_bits(one, other) for one, other in zip(params, expected, strict=True)), (switch, limit)
            assert copies == (shards if switch == "0" and name == "cuda" else 0), (switch, limit, said)


def test_shards_in_the_gpu_s_memory_give_the_bits_of_stage_2(device: torch.device) -> None:
    run_ranks(trainings, 2, device.type)


def test_expandable_segments_are_read_too(device: torch.device) -> None:
    """Which torch shares in another way than memory of its own allocator's default."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    run_processes(trainings, 2, device.type, backend="gloo", timeout_s=90, env=env)


def outlives(rank: int, _: int, name: str) -> str:
    """What rank 0 gets that goes on reading when rank 1 has died: the driver may still have its memory."""
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    model = Scales(numel=NUMEL).to(device)
    optimizer = FusedShardedAdam(
        model.named_parameters(), stage=3, bucket_cap_mb=BUCKET_MB, resident_mb=LIMITS["two buckets"]
    )
    model(batch_of(rank, 0, NUMEL).to(device)).sum().backward()
    optimizer.step()
    dist.barrier()
    if rank == 1:
        fail_now(signal.SIGKILL)

    def read_on() -> None:
        while True:
            model(batch_of(rank, 1, NUMEL).to(device))

    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        read_on()
    return str(raised.value)


def test_a_rank_that_dies_is_named_by_those_that_fetch(device: torch.device, tmp_path: Path) -> None:
    ranks = start_ranks(outlives, 2, device.type, folder=tmp_path / "ranks", timeout_s=10)
    try:
        message = ranks.answer(0, within_s=60)
        assert re.search(r"the parameters of bucket \d \(weights\.\d\) did not arrive .*rank 1 is gone", message), (
            message
        )
        ranks.processes[0].join(30)
        assert ranks.processes[0].exitcode == 0
    finally:
        ranks.close()
