"""Several ranks on one GPU over gloo, which moves their tensors through the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import MIB, Scales, batch_of, cpu_copies, train_scales
from tests.optimizer.test_bit_equality import SMALL, TINY, WHOLE, assert_same, train_rank
from tests.optimizer.test_parity import compare_each_step
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

STEPS = 4
NUMEL = 5000


def train(rank: int, _: int, device: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[float]]:
    return train_scales(rank, device, STEPS, numel=NUMEL, **options)


def one_process(world_size: int, device: torch.device, clip: float | None) -> list[Tensor]:
    """All ranks' batches in one process: gradients averaged by hand, given to an optimizer without a group."""
    model = Scales(numel=NUMEL).to(device)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2)
    params = list(model.parameters())
    for step in range(STEPS):
        gradients = []
        for rank in range(world_size):
            y = model(batch_of(rank, step, NUMEL).to(device))
            gradients.append(torch.autograd.grad((y * y).sum(), params))
        for index, param in enumerate(params):
            total = gradients[0][index]
            for other in gradients[1:]:
                total = total + other[index]
            param.grad = total / world_size
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    return cpu_copies(params)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_as_one_process_does(device: torch.device, world_size: int, stage: int, clip: float | None) -> None:
    expected = one_process(world_size, device, clip)
    options = {"stage": stage, "clip": clip, "layers_in_bucket": 2.0}
    for params, _, _ in run_ranks(train, world_size, device.type, options):
        assert all(same_bits(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"reduce_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_on_the_device_train_as_on_the_cpu(
    device: torch.device, world_size: int, options: dict[str, Any]
) -> None:
    results = run_ranks(train, world_size, device.type, {**options, "accumulate": 2})
    expected = run_ranks(train, world_size, "cpu", {**options, "accumulate": 2})
    for (params, state, norms), (cpu_params, cpu_state, cpu_norms) in zip(results, expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip([*params, *state], [*cpu_params, *cpu_state], strict=True))
        assert norms == cpu_norms


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)], ids=str
)
def test_bucket_sizes_stages_and_overlap_don_t_show(device: torch.device, world_size: int, dtype: torch.dtype) -> None:
    """In a model of matrices, norms, a tied weight and a branch that not every batch takes."""
    common = {"dtype": dtype, "clip": 0.1, "accumulate": 2, "device": device.type}
    reference = run_ranks(train_rank, world_size, {**common, "bucket_cap_mb": WHOLE})
    for changes in (
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": SMALL},
        {"bucket_cap_mb": SMALL, "stage": 1},
        {"bucket_cap_mb": SMALL, "hold": True},
    ):
        assert_same(run_ranks(train_rank, world_size, {**common, **changes}), reference)


@pytest.mark.parametrize("stage", [1, 2])
def test_each_step_is_within_the_bound_of_torch(device: torch.device, stage: int) -> None:
    run_ranks(compare_each_step, 2, torch.float32, stage, "adamw", device.type)


def held_bytes(_: int, __: int, device: str) -> tuple[int, int, int]:
    """Of the gradients of a layer a bucket: what the manager holds after backward, and after zero_grad."""
    model = Scales(numel=NUMEL).to(device)
    optimizer = FusedShardedAdam(model.parameters(), bucket_cap_mb=NUMEL * 4 / MIB)
    y = model(batch_of(0, 0, NUMEL).to(device))
    (y * y).sum().backward()
    optimizer.synchronize()
    held = optimizer.memory_bytes().gradients
    optimizer.zero_grad()
    return held, optimizer.memory_bytes().gradients, sum(p.numel() * 4 for p in model.parameters())


def test_a_rank_holds_its_share_of_the_gradients(device: torch.device) -> None:
    for held, afterwards, everything in run_ranks(held_bytes, 4, device.type):
        assert everything / 4 <= held <= 1.1 * everything / 4
        assert afterwards == 0
