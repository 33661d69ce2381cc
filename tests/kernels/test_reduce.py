"""The mean of what the ranks sent: rank order, fp32, one division, one rounding; and what their flags say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.shards import DTYPES, moment_dtype, same_bits, segments_of
from zerox import ops


def zero_words() -> Tensor:
    return torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64)


def slices_of(world: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(world)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


def mean(slices: list[Tensor], world: int) -> Tensor:
    wide = moment_dtype(slices[0].dtype)
    total = slices[0].to(wide)
    for each in slices[1:]:
        total = total + each.to(wide)
    return total / world


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_is_summed_in_rank_order_and_rounded_once(dtype: torch.dtype, world: int) -> None:
    slices = slices_of(world, 5001, dtype)
    shard = torch.full((5001,), torch.nan, dtype=dtype)
    ops.reduce_(shard, zero_words(), slices, segments_of(5001), torch.zeros(1, dtype=torch.uint8), world, False)
    assert same_bits(shard, mean(slices, world).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_flight_adds_to_the_shard_except_where_it_replaces(dtype: torch.dtype) -> None:
    segments = segments_of(300, 5, 4096, gap=11)
    numel = int(segments[-1, 1]) + 9
    slices = slices_of(3, numel, dtype)
    old = torch.randn(numel, dtype=torch.float64).to(dtype)
    shard = old.clone()
    ops.reduce_(shard, zero_words(), slices, segments, torch.tensor([0, 1, 0], dtype=torch.uint8), 3, True)
    added = (mean(slices, 3) + old.to(moment_dtype(dtype))).to(dtype)
    replaced = mean(slices, 3).to(dtype)
    covered = torch.zeros(numel, dtype=torch.bool)
    for (start, stop, *_), expected in zip(segments.tolist(), (added, replaced, added), strict=True):
        assert same_bits(shard[start:stop], expected[start:stop])
        covered[start:stop] = True
    assert shard[~covered].count_nonzero() == 0, "padding is zero"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_words_are_those_of_a_pass_over_the_shard(dtype: torch.dtype) -> None:
    segments = segments_of(300, 5, 4096, gap=11)
    numel = int(segments[-1, 1])
    shard, limbs, expected = torch.empty(numel, dtype=dtype), zero_words(), zero_words()
    ops.reduce_(shard, limbs, slices_of(2, numel, dtype), segments, torch.zeros(3, dtype=torch.uint8), 2, False)
    ops.norm_(expected, shard, segments, 2.0)
    assert torch.equal(limbs, expected)
    assert limbs.any()


def test_flags_are_joined_over_ranks() -> None:
    # present, replaced of two segments on three ranks, behind a shard of four elements
    slices = [
        torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 0]),
        torch.tensor([9.0, 9, 9, 9, 1, 0, 0, 0]),
        torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 1]),
    ]
    for before, after in (([0, 0], [1, 0]), ([1, 1], [1, 0])):
        present = torch.tensor(before, dtype=torch.uint8)
        replaced = torch.full((2,), 77, dtype=torch.uint8)
        ops.read_flags_(present, replaced, slices, 4)
        assert present.tolist() == after
        assert replaced.tolist() == [0, 1]


def test_presence_stays_while_nobody_replaces() -> None:
    present, replaced = torch.tensor([1], dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    ops.read_flags_(present, replaced, [torch.zeros(6), torch.zeros(6)], 4)
    assert present.tolist() == [1]


def test_a_flag_counts_whatever_its_size() -> None:
    # A backend that sums sends the number of ranks, rounded to its dtype.
    for dtype in DTYPES:
        present, replaced = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        ops.read_flags_(present, replaced, [torch.tensor([0.0, 0.0, 512.0, 3.0]).to(dtype)], 2)
        assert (present.tolist(), replaced.tolist()) == ([1], [1])
