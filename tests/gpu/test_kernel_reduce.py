"""The mean of the ranks' slices and their flags on a device: the CPU kernel's bits."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.twins import Fences, ragged_segments, same_bits_but_nan, strew
from tests.kernels.shards import DTYPES, same_bits, segments_of
from tests.kernels.test_reduce import mean, slices_of
from zerox import ops


class Reduction:
    """Arguments of reduce_ on the CPU, and their twins on a device."""

    def __init__(
        self, seed: int, dtype: torch.dtype, world: int, segments: torch.Tensor, numel: int, accumulate: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.world, self.accumulate = world, accumulate
        self.slices = [torch.randn(numel + 40, generator=generator).to(dtype) for _ in range(world)]
        for each in self.slices:
            strew(each, generator)
        self.segments = segments
        self.replaced = torch.randint(0, 2, (len(segments),), generator=generator, dtype=torch.uint8)
        self.shard = torch.randn(numel, generator=generator).to(dtype)
        if not accumulate:
            self.shard.fill_(torch.nan)  # every element has to be written, padding too
        self.words = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64)
        ops.norm_(self.words, self.slices[0][:numel], segments, 2.0)  # there may be something already

    def run(self) -> None:
        ops.reduce_(self.shard, self.words, self.slices, self.segments, self.replaced, self.world, self.accumulate)

    def twin(self, fences: Fences, offset: int) -> Reduction:
        twin = object.__new__(Reduction)
        twin.world, twin.accumulate = self.world, self.accumulate
        twin.slices = [fences.put(s, offset * index) for index, s in enumerate(self.slices)]
        for name in ("segments", "replaced", "words"):
            setattr(twin, name, fences.put(getattr(self, name)))
        twin.shard = fences.put(self.shard, offset)
        return twin


def assert_same_reduction(cpu: Reduction, device: torch.device, offset: int = 0) -> None:
    fences = Fences(device)
    twin = cpu.twin(fences, offset)
    cpu.run()
    twin.run()
    assert same_bits(twin.shard.cpu(), cpu.shard)
    assert torch.equal(twin.words.cpu(), cpu.words)
    fences.check()


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_and_its_squares_are_the_cpu_kernel_s(
    device: torch.device, seed: int, dtype: torch.dtype, world: int, offset: int, accumulate: bool
) -> None:
    segments, numel = ragged_segments(random.Random(seed))
    assert_same_reduction(Reduction(seed, dtype, world, segments, numel, accumulate), device, offset)


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tails_too(device: torch.device, seed: int, dtype: torch.dtype, numel: int) -> None:
    assert_same_reduction(Reduction(seed, dtype, 2, segments_of(numel), numel, False), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_tiles_than_fit_on_a_device_at_a_time(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    segments = segments_of(3_000_064, 700_007, 1, 1_300_000, gap=77)
    assert_same_reduction(Reduction(seed, dtype, 2, segments, int(segments[-1, 1]) + 9, True), device)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_is_summed_in_rank_order_and_rounded_once(
    device: torch.device, dtype: torch.dtype, world: int
) -> None:
    fences = Fences(device)
    slices = slices_of(world, 5001, dtype)
    shard = fences.room(5001, dtype)
    words = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=device)
    replaced = torch.zeros(1, dtype=torch.uint8, device=device)
    ops.reduce_(shard, words, [s.to(device) for s in slices], segments_of(5001).to(device), replaced, world, False)
    assert same_bits(shard.cpu(), mean(slices, world).to(dtype))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_and_is_counted(
    device: torch.device, seed: int, dtype: torch.dtype, value: float
) -> None:
    cpu = Reduction(seed, dtype, 2, segments_of(700, 300), 1000, False)
    cpu.slices[1][600:800:50] = value
    twin = cpu.twin(Fences(device), 0)
    cpu.run()
    twin.run()
    assert same_bits_but_nan(twin.shard, cpu.shard)
    assert not torch.isfinite(cpu.shard).all()
    ours, theirs = ops.norm_value(twin.words, 2.0).cpu(), ops.norm_value(cpu.words, 2.0)
    assert same_bits_but_nan(ours, theirs)
    assert ours[1] == 0.0


@pytest.mark.parametrize("world", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flags_are_joined_as_on_the_cpu(device: torch.device, seed: int, dtype: torch.dtype, world: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for count in (0, 1, 5, 3000):
        raised = torch.rand(world, 2 * count, generator=generator) < 0.3 / world
        counts = torch.randint(1, 600, raised.shape, generator=generator)  # a backend that sums sends larger numbers
        garbage = torch.full((world, 7), torch.nan)
        slices = list(torch.cat([garbage, raised * counts], dim=1).to(dtype))
        present = torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8)
        fences = Fences(device)
        replaced, ours_present, ours_replaced = present.clone(), fences.put(present), fences.room(count, torch.uint8)
        ops.read_flags_(ours_present, ours_replaced, [fences.put(s, 1) for s in slices], 7)
        ops.read_flags_(present, replaced, slices, 7)
        assert torch.equal(ours_present.cpu(), present)
        assert torch.equal(ours_replaced.cpu(), replaced)
        fences.check()
