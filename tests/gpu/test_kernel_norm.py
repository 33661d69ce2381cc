"""Norms on a device: the CPU's exact words, bit for bit; through the device's pow() to 1e-12."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.gpu.twins import DEVICE, Fences, ragged_segments, same_bits_but_nan, strew
from tests.kernels.shards import DTYPES, same_bits, segments_of
from tests.tolerances import POW_NORM_RTOL
from zerox import ops

EXACT = [1.0, 2.0, math.inf]
POWERS = [3.0, 0.5]
# More than fit on a device at a time. The fake accelerator has room for three blocks, and takes a second per million.
MANY_TILES = 300_007 if DEVICE.type == "fake" else 5_000_011


def words_of(shard: torch.Tensor, segments: torch.Tensor, p: float, words: torch.Tensor | None = None) -> torch.Tensor:
    """Added to ``words``, if given."""
    words = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=shard.device) if words is None else words
    ops.norm_(words, shard, segments, p)
    return words


def random_shard(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shard = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    strew(shard, generator)
    return shard


@pytest.mark.parametrize("p", EXACT)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "off by 1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_and_value_are_the_cpu_s(
    device: torch.device, seed: int, dtype: torch.dtype, offset: int, p: float
) -> None:
    segments, numel = ragged_segments(random.Random(seed))
    first, second = random_shard(seed, numel, dtype), random_shard(seed + 1, numel, dtype)
    fences = Fences(device)
    on_device = fences.put(segments)
    ours = words_of(fences.put(first, offset), on_device, p, fences.put(torch.zeros(ops.EXACT_LIMBS).long()))
    ours = words_of(fences.put(second, offset), on_device, p, ours)
    theirs = words_of(second, segments, p, words_of(first, segments, p))
    assert theirs.any()
    assert torch.equal(ours.cpu(), theirs)
    assert same_bits(ops.norm_value(ours, p).cpu(), ops.norm_value(theirs, p))
    fences.check()


@pytest.mark.parametrize("p", [*EXACT, *POWERS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_torch_s_in_float64(device: torch.device, seed: int, dtype: torch.dtype, p: float) -> None:
    shard = torch.randn(100_003, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    words = words_of(Fences(device).put(shard), segments_of(100_003).to(device), p)
    value, finite = ops.norm_value(words, p).tolist()
    assert finite == 1.0
    assert value == pytest.approx(float(torch.linalg.vector_norm(shard.double(), p)), rel=POW_NORM_RTOL)
    theirs, _ = ops.norm_value(words_of(shard, segments_of(100_003), p), p).tolist()
    assert value == pytest.approx(theirs, rel=POW_NORM_RTOL)


@pytest.mark.parametrize("p", EXACT)
@pytest.mark.parametrize("numel", [0, 1, 31, 255, 256, 257, 2047, 2048, 2049, MANY_TILES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tails_and_many_tiles(device: torch.device, seed: int, dtype: torch.dtype, numel: int, p: float) -> None:
    shard, segments = random_shard(seed, numel, dtype), segments_of(numel)
    assert torch.equal(words_of(shard.to(device), segments.to(device), p).cpu(), words_of(shard, segments, p))


@pytest.mark.parametrize("p", EXACT)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_flagged(
    device: torch.device, seed: int, dtype: torch.dtype, value: float, p: float
) -> None:
    shard = random_shard(seed, 3000, dtype)
    shard[2345] = value
    ours = ops.norm_value(words_of(shard.to(device), segments_of(3000).to(device), p), p).cpu()
    assert same_bits_but_nan(ours, ops.norm_value(words_of(shard, segments_of(3000), p), p))
    assert ours[1] == 0.0


@pytest.mark.parametrize("p", [*EXACT, *POWERS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_segment_has_its_own_words(device: torch.device, seed: int, dtype: torch.dtype, p: float) -> None:
    segments, numel = ragged_segments(random.Random(seed))
    shard, fences = random_shard(seed, numel, dtype), Fences(device)
    ours = fences.put(torch.zeros(len(segments), ops.EXACT_LIMBS).long())
    ops.norm_(ours, fences.put(shard), fences.put(segments), p)
    theirs = torch.stack([words_of(shard, segments[row : row + 1], p) for row in range(len(segments))])
    if p in EXACT:
        assert torch.equal(ours.cpu(), theirs)
    torch.testing.assert_close(ops.norm_value(ours, p).cpu(), ops.norm_value(theirs, p), rtol=POW_NORM_RTOL, atol=0)
    fences.check()


def test_padding_does_not_count(device: torch.device) -> None:
    shard = torch.full((1000,), torch.nan, device=device)
    shard[10:20] = 2.0
    words = words_of(shard, torch.tensor([[10, 20, 0, 0, 0]], device=device), 2.0)
    assert ops.norm_value(words, 2.0).tolist() == [math.sqrt(40.0), 1.0]
