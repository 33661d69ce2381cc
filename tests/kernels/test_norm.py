"""Exact norms: the value, and that nothing but the elements shows in it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.kernels.shards import DTYPES, segments_of
from zerox import ops

NORMS = [1.0, 2.0, 3.0, 0.5, math.inf]


def words_of(shard: Tensor, segments: Tensor, p: float) -> Tensor:
    limbs = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64)
    ops.norm_(limbs, shard, segments, p)
    return limbs


def norm_of(*parts: tuple[Tensor, Tensor], p: float = 2.0) -> tuple[float, bool]:
    total = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64)
    for shard, segments in parts:
        limbs = words_of(shard, segments, p)
        total = torch.maximum(total, limbs) if math.isinf(p) else total + limbs
    value, finite = ops.norm_value(total, p).tolist()
    return value, finite == 1.0


def random(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_torch_s_in_float64(dtype: torch.dtype, p: float) -> None:
    shard = random(10_001, dtype)
    value, finite = norm_of((shard, segments_of(10_001)), p=p)
    assert finite
    assert value == pytest.approx(float(torch.linalg.vector_norm(shard.double(), p)), rel=1e-14)


@pytest.mark.parametrize("p", NORMS)
def test_padding_does_not_count(p: float) -> None:
    shard = torch.full((100,), torch.nan)
    shard[10:20] = 2.0
    segments = torch.tensor([[10, 20, 0, 0, 0]])
    value, finite = norm_of((shard, segments), p=p)
    assert finite
    assert value == pytest.approx(2.0 if math.isinf(p) else 2.0 * 10 ** (1 / p))


@pytest.mark.parametrize("p", NORMS)
def test_cutting_at_blocks_changes_nothing(p: float) -> None:
    whole = random(256 * 40 + 77)
    expected = words_of(whole, segments_of(whole.numel()), p)
    for cuts in ([256], [256 * 13, 256 * 14], [256 * k for k in range(1, 40)]):
        total = torch.zeros_like(expected)
        for a, b in itertools.pairwise([0, *cuts, whole.numel()]):
            limbs = words_of(whole[a:b].clone(), segments_of(b - a), p)
            total = torch.maximum(total, limbs) if math.isinf(p) else total + limbs
        # The limbs, carried: a value that is rounded would hide a wrong partial.
        if not math.isinf(p):
            ops.norm_(total, whole[:1], segments_of(0), p)
        assert torch.equal(total, expected)


def test_a_sum_that_floating_point_would_lose_is_exact() -> None:
    shard = torch.zeros(3 * 256, dtype=torch.float64)
    shard[0], shard[256], shard[512] = 1e100, 1e-100, 3.0
    total, _ = norm_of((shard, segments_of(shard.numel())), p=1.0)
    assert total == 1e100
    limbs = words_of(shard, segments_of(shard.numel()), 1.0) - words_of(shard[:1], segments_of(1), 1.0)
    assert ops.norm_value(limbs, 1.0)[0] == 3.0


@pytest.mark.parametrize(("value", "p"), [(torch.inf, 2.0), (torch.nan, 2.0), (torch.inf, 1.0), (torch.nan, math.inf)])
def test_elements_that_are_not_finite_are_flagged(value: float, p: float) -> None:
    shard = random(1000)
    shard[700] = value
    norm, finite = norm_of((shard, segments_of(1000)), p=p)
    assert not finite
    assert math.isnan(norm) if math.isnan(value) else math.isinf(norm)


def test_squares_may_overflow_while_every_element_is_finite() -> None:
    large = torch.full((1000,), 3e38)
    assert norm_of((large, segments_of(1000))) == (pytest.approx(3e38 * math.sqrt(1000), rel=1e-6), True)
    huge = torch.full((1000,), 1e200, dtype=torch.float64)
    assert norm_of((huge, segments_of(1000))) == (math.inf, True)


@pytest.mark.parametrize("p", NORMS)
def test_each_segment_has_its_own_words(p: float) -> None:
    """Small ones, of which a thread has several, and one of many units."""
    starts = [0, 1, 300, 4096, 4096, 70_000]
    segments = torch.tensor([[a, b, 0, 0, 0] for a, b in zip(starts, [*starts[1:], 300_000], strict=True)])
    shard = random(300_000)
    limbs = torch.zeros(len(segments), ops.EXACT_LIMBS, dtype=torch.int64)
    ops.norm_(limbs, shard, segments, p)
    alone = torch.stack([words_of(shard, segments[row : row + 1], p) for row in range(len(segments))])
    assert torch.equal(limbs, alone)
    values = ops.norm_value(limbs, p)
    assert values.shape == (len(segments), 2)
    for value, row in zip(values, alone, strict=True):
        assert torch.equal(value, ops.norm_value(row, p))


def test_an_empty_shard_has_norm_0() -> None:
    for p in NORMS:
        assert norm_of((torch.empty(256), segments_of()), p=p) == (0.0, True)
