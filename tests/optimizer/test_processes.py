"""Ranks as programs of their own: data-loader workers that are forked, and an exit with work in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_programs

PROGRAM = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.bucket_manager.rig import LAYER_CAP, WIDTH, Chain, same_bits
from zerox import FusedShardedAdam

rank, store, stage = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __init__(self, model):
        self.model = model

    def __getitem__(self, index):
        sum(p.sum() for p in self.model.parameters())  # of its own, which nothing will arrive in
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


def train(num_workers):
    model = Chain(3)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20)
    if num_workers:
        optimizer.overlap_gather(model)
        optimizer.inside.manager.params.hold_back(True)
    context = "fork" if num_workers else None
    for epoch in range(3):  # the second one's workers are forked after steps, the third one's between backward and step
        for x in DataLoader(Numbers(model), batch_size=2, num_workers=num_workers, multiprocessing_context=context):
            model(x).square().mean().backward()
            if epoch != 1:
                optimizer.step()
                optimizer.zero_grad()
        assert epoch != 0 or not num_workers or optimizer.inside.manager.params.missing
    return model, optimizer


alone, _ = train(0)
model, optimizer = train(2)
assert all(same_bits(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
print("trained", flush=True)

dist.barrier()
optimizer.inside.manager.flights.hold_back(True)
if rank == 0 and stage == 2:  # the other rank leaves without a backward
    model(torch.ones(2, WIDTH)).square().mean().backward()
    assert optimizer.inside.manager.flights.num_reduced < optimizer.inside.manager.flights.num_launched
if len(sys.argv) > 4:
    dist.destroy_process_group()
print("leaves", flush=True)
"""


@pytest.mark.parametrize(("stage", "destroy"), [(1, ["destroy"]), (2, [])], ids=str)
def test_forked_workers_and_an_exit_with_work_in_flight_end_cleanly(
    stage: int, destroy: list[str], tmp_path: Path
) -> None:
    for printed in run_programs(PROGRAM, tmp_path, str(stage), *destroy):
        assert printed.split() == ["trained", "leaves"]
