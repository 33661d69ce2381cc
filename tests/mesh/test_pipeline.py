"""Pipeline parallel by recipe: the whole schedule inside no_sync(), and the norm over all stages."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tests.ranks import run_ranks
from tests.tolerances import NORM_RTOL
from zerox import FusedShardedAdam, clip_grad_norm_

WIDTH = 12
MICRO = 4  # micro-batches of a step on each data-parallel rank
ROWS = 4  # of a micro-batch
STEPS = 20
MOST = 0.02
SCHEDULES: dict[str, tuple[Any, int]] = {  # and how many stages a rank has
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "1F1B without no_sync": (Schedule1F1B, 1),  # which multiplies what stands for gradients that have left
}


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of all data-parallel ranks."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * MICRO * ROWS, WIDTH, generator=generator)
    return x, y


def train(rank: int, name: str) -> tuple[list[float], float, float]:
    """Norms, and how far they and this rank's parameters are from those of AdamW on the whole model."""
    schedule_class, per_rank = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, of = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    numbers = [place + 2 * index for index in range(per_rank)]
    whole = layers(2 * per_rank)
    twin = nn.Sequential(*copy.deepcopy(whole))
    own = nn.ModuleList(whole[number] for number in numbers)
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(whole[number], number, 2 * per_rank, torch.device("cpu"), group=group) for number in numbers
    ]
    schedule = schedule_class(stages if per_rank > 1 else stages[0], MICRO, loss_fn=loss_of)
    optimizer = FusedShardedAdam(own.named_parameters(), lr=1e-3, process_group=mesh["dp"], norm_group=mesh["pp"])
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    norms, off = [], 0.0
    for step in range(STEPS):
        x, y = batch(step)
        mine_x, mine_y = x.chunk(2)[of], y.chunk(2)[of]
        with contextlib.nullcontext() if "without" in name else optimizer.no_sync():
            if place == 0:
                schedule.step(mine_x, target=mine_y)
            else:
                schedule.step(target=mine_y)
        loss_of(twin(x), y).backward()
        norms.append(float(optimizer.clip_grad_norm_(MOST)))
        expected = float(nn.utils.clip_grad_norm_(twin.parameters(), MOST))
        off = max(off, abs(norms[-1] - expected) / expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    pairs = [(p, q) for number, part in zip(numbers, own, strict=True) for p, q in pairs_of(part, twin[number])]
    return norms, off, max(float((p - q).detach().abs().max()) for p, q in pairs)


def pairs_of(part: nn.Module, twin: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return list(zip(part.parameters(), twin.parameters(), strict=True))


def all_schedules(rank: int, _: int) -> dict[str, tuple[list[float], float, float]]:
    return {name: train(rank, name) for name in SCHEDULES}


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[list[float], float, float]]]:
    return run_ranks(all_schedules, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_trains_as_the_whole_model(found: list[Any], name: str) -> None:
    for of_rank in found:
        norms, off, far = of_rank[name]
        assert norms == found[0][name][0], "the same bits on all ranks"
        assert min(norms) > MOST, "each step is clipped"
        assert off <= NORM_RTOL
        assert far <= 2e-6


def interleaved(rank: int, _: int, stage: int, together: bool) -> tuple[float, float]:
    """Without no_sync(), with an optimizer for each of the rank's two stage modules, or one for both of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, of = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    whole = layers(4)
    twin = nn.Sequential(*copy.deepcopy(whole))
    own = [whole[place], whole[place + 2]]
    group = mesh.get_group("pp")
    stages = [PipelineStage(each, whole.index(each), 4, torch.device("cpu"), group=group) for each in own]
    schedule = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=loss_of)
    optimizers = [
        FusedShardedAdam(each.parameters(), process_group=mesh["dp"], norm_group=mesh["pp"], stage=stage)
        for each in ([nn.ModuleList(own)] if together else own)
    ]
    reference = torch.optim.AdamW(twin.parameters())
    off = 0.0
    for step in range(3):
        x, y = (each.chunk(2)[of] for each in batch(step))
        if place == 0:
            schedule.step(x, target=y)
        else:
            schedule.step(target=y)
        whole_x, whole_y = batch(step)
        loss_of(twin(whole_x), whole_y).backward()
        norm = float(clip_grad_norm_(optimizers, MOST))
        expected = float(nn.utils.clip_grad_norm_(twin.parameters(), MOST))
        off = max(off, abs(norm - expected) / expected)
        for each in (*optimizers, reference):
            each.step()
            each.zero_grad()
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.whole())
        pairs = [pair for each in own for pair in pairs_of(each, twin[whole.index(each)])]
        return off, max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_interleaved_stages_need_no_no_sync(stage: int, together: bool) -> None:
    """The schedule divides a module's gradients when that is done, and others' backwards follow."""
    for off, far in run_ranks(interleaved, 4, stage, together):
        assert off <= NORM_RTOL
        assert far <= 2e-6
