"""A rank saves the whole state alone while another one's collectives wait for it: Note [State is pulled]."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import Any

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


def trained(rank: int, kind: str, stage: int) -> tuple[nn.Module, Any]:
    os.environ["ZEROX_EXCHANGE"] = "native"
    torch.manual_seed(0)
    dtype, options = KINDS[kind]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE, dtype)
    optimizer = make_optimizer(model.parameters(), lr=1e-3, stage=stage, bucket_cap_mb=0.02, **options)
    step(model, optimizer, rank)
    return model, optimizer


def saves_while_the_other_is_ahead(rank: int, world_size: int, kind: str, stage: int) -> None:
    model, optimizer = trained(rank, kind, stage)
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


def reads_and_writes(rank: int, world_size: int, kind: str, stage: int) -> None:
    """optimizer.state, while the other rank has not begun or is through."""
    model, optimizer = trained(rank, kind, stage)
    before: dict[int, Any] = {}
    for reader in range(world_size):
        found = optimizer.full_state_dict(to=reader)
        before = found["state"] if reader == rank else before
    time.sleep(rank)
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == DEVICE.type
        state["exp_avg"].sub_(state["exp_avg"].mean())
        state["exp_avg_sq"] = state["exp_avg_sq"] * 0.5
    optimizer.synchronize()
    for number, state in enumerate(optimizer.state.values()):  # on each rank, the whole of it
        moment = before[number]["exp_avg"].to(DEVICE)
        assert same_bits(state["exp_avg"] * 1, moment - moment.mean()), number
        assert same_bits(state["exp_avg_sq"] * 1, before[number]["exp_avg_sq"].to(DEVICE) * 0.5), number
    step(model, optimizer, rank)
    dist.barrier()


def run_two(device: torch.device, function: Callable[..., None], *args: Any) -> None:
    if BACKEND == "nccl" and (reason := no_two_ranks()):
        pytest.skip(reason)
    environment = {**OF_TWO_RANKS, **preloaded()} if BACKEND == "nccl" else {}
    run_processes(function, 2, *args, backend=BACKEND, timeout_s=TWO_RANKS_TIMEOUT_S, env=environment)


@pytest.mark.parametrize(("kind", "stage"), [("fp32", 2), ("bf16 remainder, 8-bit moments", 1), ("bf16 remainder", 3)])
def test_a_rank_saves_while_anothers_collectives_wait_for_it(device: torch.device, kind: str, stage: int) -> None:
    run_two(device, saves_while_the_other_is_ahead, kind, stage)


@pytest.mark.parametrize(("kind", "stage"), [("fp32", 2), ("bf16 remainder", 1), ("bf16 remainder", 3)])
def test_state_that_is_read_and_written_is_no_race(device: torch.device, kind: str, stage: int) -> None:
    run_two(device, reads_and_writes, kind, stage)
