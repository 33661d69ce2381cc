"""A rank saves the whole state alone while another one's collectives wait for it: Note [State is pulled]."""

from __future__ import annotations

import io
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.processes import run_processes
from tests.gpu.test_nccl import BACKEND, OF_TWO_RANKS, TWO_RANKS_TIMEOUT_S, no_two_ranks, preloaded
from tests.gpu.twins import DEVICE
from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS, make_optimizer

LAYERS, WIDTH = 40, 64  # more reads of state than a pool of torch's has streams


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    x = torch.full((4, WIDTH), 1.0 + rank, device=DEVICE, dtype=next(model.parameters()).dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saves_while_the_other_is_ahead(rank: int, world_size: int, kind: str, stage: int) -> None:
    os.environ["ZEROX_EXCHANGE"] = "native"
    torch.manual_seed(0)
    dtype, options = KINDS[kind]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE, dtype)
    optimizer = make_optimizer(model.parameters(), lr=1e-3, stage=stage, bucket_cap_mb=0.02, **options)
    step(model, optimizer, rank)
    expected = optimizer.full_state_dict()
    if rank == 0:
        time.sleep(1)  # rank 1 is in its next backward by now
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        found = torch.load(file, weights_only=True)["state"]
        assert found.keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            for key, value in state.items():
                assert found[number][key].device.type == "cpu"
                assert same_bits(found[number][key], value), (number, key)
    step(model, optimizer, rank)
    dist.barrier()


@pytest.mark.parametrize(("kind", "stage"), [("fp32", 2), ("bf16 remainder, 8-bit moments", 1), ("bf16 remainder", 3)])
def test_a_rank_saves_while_anothers_collectives_wait_for_it(device: torch.device, kind: str, stage: int) -> None:
    if BACKEND == "nccl" and (reason := no_two_ranks()):
        pytest.skip(reason)
    environment = {**OF_TWO_RANKS, **preloaded()} if BACKEND == "nccl" else {}
    run_processes(
        saves_while_the_other_is_ahead,
        2,
        kind,
        stage,
        backend=BACKEND,
        timeout_s=TWO_RANKS_TIMEOUT_S,
        env=environment,
    )
