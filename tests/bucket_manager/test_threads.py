"""Ranks may be threads of one process: nothing in the manager is global."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of, same_bits
from tests.ranks import run_ranks, run_threads
from zerox import FusedShardedAdam


def train(group: dist.ProcessGroup | None, rank: int, stage: int) -> list[Tensor]:
    model = Chain(4)
    optimizer = FusedShardedAdam(
        model.parameters(), lr=1e-2, process_group=group, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20
    )
    for seed in range(4):
        with optimizer.no_sync():
            model(input_of(rank, 2 * seed)).square().mean().backward()
        model(input_of(rank, 2 * seed + 1)).square().mean().backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def as_process(rank: int, _: int, stage: int) -> list[Tensor]:
    return train(None, rank, stage)


def as_thread(group: dist.ProcessGroup, stage: int) -> list[Tensor]:
    torch.set_num_threads(1)  # of this thread, as processes have: BLAS gives other bits with more
    return train(group, group.rank(), stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_four_threads_give_the_bits_of_four_processes(stage: int) -> None:
    threads = run_threads(as_thread, 4, stage)
    processes = run_ranks(as_process, 4, stage)
    for ours, theirs in zip(threads, processes, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(same_bits(a, b) for a, b in zip(ours, threads[0], strict=True))
