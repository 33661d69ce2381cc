"""Muon on one device: torch.optim.Muon's bits there, on one rank and on several that share the device over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.twins import DEVICE
from tests.kernels.shards import same_bits
from tests.muon import test_around, test_bits
from tests.muon.rig import OPTIONS, Model, apart, build
from tests.ranks import run_ranks
from zerox.rules.muon import COEFFICIENTS
from zerox.update.newton_schulz import Iteration, orthogonalize


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_clipped_steps_have_the_bits_of_torchs_on_the_mean(device: torch.device, world_size: int) -> None:
    """Of wide, tall and transposed matrices, of stacks, and of parameters that are cut by rows; in all stages."""
    run_ranks(test_bits.follow, world_size, {}, torch.float32, False, 3, device.type)


@pytest.mark.parametrize("options", test_bits.OTHERS.values(), ids=test_bits.OTHERS)
def test_options_are_torchs(device: torch.device, options: dict[str, Any]) -> None:
    run_ranks(test_bits.follow, 1, options, torch.float32, True, 3, device.type)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_other_parameters_are_those_of_their_masters(device: torch.device, world_size: int, dtype: torch.dtype) -> None:
    run_ranks(test_bits.masters, world_size, dtype, device.type)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "8bit"], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_momentum_in_fewer_bits_is_the_average_rounded_once(
    device: torch.device, world_size: int, dtype: Any
) -> None:
    run_ranks(test_around.stored, world_size, dtype, device.type)


# ---- what a matrix does not depend on


def trained(_: int, __: int, device: str, dtype: torch.dtype, state_dtype: Any, stage: int) -> tuple[str, str]:
    model = Model(dtype).to(device)
    optimizer = build(model, False, OPTIONS, state_dtype=state_dtype, stage=stage)
    test_around.ahead(model, optimizer, range(3))
    return test_around.digests(model, optimizer)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, "8bit")], ids=["fp32", "bf16, 8bit"]
)
def test_bits_don_t_depend_on_the_number_of_ranks(
    device: torch.device, dtype: torch.dtype, state_dtype: Any, stage: int
) -> None:
    how = (device.type, dtype, state_dtype, stage)
    [alone] = run_ranks(trained, 1, *how)
    for world_size in (2, 4):  # whose mean of equal gradients is exact
        assert run_ranks(trained, world_size, *how)[0] == alone, world_size


# Those of GPT-2 and of its XL, and such as no tile of a product fits.
SHAPES = [(2304, 768), (768, 768), (768, 3072), (4800, 1600), (1000, 333)]
SMALL_SHAPES = [(96, 48), (64, 64), (48, 96), (67, 33)]  # a CPU without units for bfloat16 needs seconds for the others


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("shape", SHAPES if DEVICE.type == "cuda" else SMALL_SHAPES, ids=str)
def test_matrices_of_a_batch_have_the_bits_of_one_alone(
    device: torch.device, seed: int, shape: tuple[int, int], count: int, transposed: bool
) -> None:
    """Whether these go in a batch is found out by other numbers. The CPU never makes one, the fake accelerator does."""
    by = Iteration(COEFFICIENTS, 5, 1e-7)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape[::-1] if transposed else shape, generator=generator) for _ in range(count)]
    matrices = [(each.t() if transposed else each).to(device, torch.bfloat16) for each in drawn]
    together = orthogonalize([each.clone() for each in matrices], by)
    for matrix, of_batch in zip(matrices, together, strict=True):
        [alone] = orthogonalize([matrix.clone()], by)
        assert alone.shape == shape
        assert same_bits(of_batch.cpu(), alone.cpu()), apart(of_batch, alone)
        assert 0.3 < float(alone.float().square().sum()) / min(shape) < 1.3, "nearly orthogonal"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_nan_stays_in_its_matrix(device: torch.device, world_size: int) -> None:
    assert run_ranks(test_around.poisoned, world_size, device.type) == [{"experts"}] * world_size


@pytest.mark.parametrize("stage", [2, 3])
def test_other_ranks_go_on_with_the_same_bits(device: torch.device, tmp_path: Path, stage: int) -> None:
    path = str(tmp_path / "checkpoint")
    before = run_ranks(test_around.saved, 2, stage, path, device.type)[0]
    assert run_ranks(test_around.resumed, 1, stage, path, device.type)[0] == before
