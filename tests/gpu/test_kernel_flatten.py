"""Packing on a device: the CPU kernel's bits, whatever the pieces and wherever they start."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.gpu.twins import Fences, random_bits, strew
from tests.kernels.shards import DTYPES, same_bits
from zerox import ops

NUMELS = [0, 1, 2, 7, 8, 9, 31, 255, 256, 257, 1000, 4096, 10_007]


def cut_and_placed(rng: random.Random, numels: list[int]) -> tuple[Tensor, Tensor, int]:
    """Each source cut into up to three pieces, the pieces placed in any order with gaps; flags in gaps; numel."""
    pieces = []
    for source, numel in enumerate(numels):
        cuts = sorted(rng.sample(range(numel + 1), min(2, numel)))
        for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
            pieces.append((source, start, stop - start))
    rng.shuffle(pieces)
    rows, gaps, end = [], [], 0
    for source, start, numel in pieces:
        gap = rng.choice([0, 0, 1, 3, 8, 400])
        gaps += range(end, end + gap)
        rows.append([source, start, end + gap, numel])
        end += gap + numel
    gaps += range(end, end + 5)
    flags = rng.sample(gaps, len(gaps) // 3)  # in no order
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4), torch.tensor(flags, dtype=torch.int64), end + 5


def assert_same_packing(
    sources: list[Tensor], pieces: Tensor, flags: Tensor, numel: int, to: torch.dtype, offset: int, device: torch.device
) -> None:
    fences = Fences(device)
    flat, expected = fences.room(numel, to, offset), torch.full((numel,), torch.nan, dtype=to)
    ops.flatten_(expected, sources, pieces, flags)
    # Each source starts elsewhere within 16 bytes.
    ops.flatten_(flat, [fences.put(s, offset * index) for index, s in enumerate(sources)], pieces, flags)
    assert same_bits(flat.cpu(), expected)
    fences.check()


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_pieces_are_cast_and_placed_as_on_the_cpu(
    device: torch.device, seed: int, source: torch.dtype, to: torch.dtype, offset: int
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sources = [torch.randn(n, generator=generator, dtype=torch.float64).mul(100).to(source) for n in NUMELS]
    for each in sources[3:]:
        strew(each, generator)
        each[:2] = torch.tensor([torch.inf, -torch.inf], dtype=source)
    assert_same_packing(sources, *cut_and_placed(rng, NUMELS), to, offset, device)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_nan_stays_one(device: torch.device, source: torch.dtype, to: torch.dtype) -> None:
    values = torch.tensor([1.0, torch.nan, 2.0] * 100, dtype=source)
    flat = Fences(device).room(300, to)
    ops.flatten_(flat, [values.to(device)], torch.tensor([[0, 0, 0, 300]]), torch.empty(0, dtype=torch.int64))
    assert torch.equal(flat.cpu().isnan(), values.isnan())
    assert torch.equal(flat.cpu().nan_to_num(nan=7.0).double(), values.nan_to_num(nan=7.0).double())


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_keeps_every_pattern_of_bits(device: torch.device, seed: int, dtype: torch.dtype, offset: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sources = [random_bits(n, dtype, generator) for n in NUMELS]
    assert_same_packing(sources, *cut_and_placed(rng, NUMELS), dtype, offset, device)


def test_sources_of_several_dtypes_fill_one_bucket(device: torch.device, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sources = [torch.randn(n, generator=generator).to(rng.choice(DTYPES)) for n in NUMELS]
    assert_same_packing(sources, *cut_and_placed(rng, NUMELS), torch.bfloat16, 0, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_tiles_than_fit_on_a_device_at_a_time(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    numels = [3_000_001, 1, 2_000_000, 700_007]
    sources = [torch.randn(n, generator=generator) for n in numels]
    assert_same_packing(sources, *cut_and_placed(rng, numels), dtype, 0, device)


def test_thousands_of_pieces(device: torch.device, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    numels = [rng.choice([1, 5, 64, 300]) for _ in range(3000)]
    sources = [torch.randn(n, generator=generator) for n in numels]
    assert_same_packing(sources, *cut_and_placed(rng, numels), torch.float32, 0, device)


@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_a_bucket_without_gradients_is_zero_but_for_its_flags(device: torch.device, numel: int) -> None:
    flags = torch.arange(0, numel, 3)
    assert_same_packing([], torch.empty(0, 4, dtype=torch.int64), flags, numel, torch.bfloat16, 0, device)


def test_dense_sources_are_taken_in_memory_order(device: torch.device) -> None:
    source = torch.arange(24.0).to(device).view(4, 6).t()
    flat = Fences(device).room(24, torch.float32)
    ops.flatten_(flat, [source], torch.tensor([[0, 0, 0, 24]]), torch.empty(0, dtype=torch.int64))
    assert torch.equal(flat.cpu(), torch.arange(24.0))
