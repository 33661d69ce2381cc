"""Every kernel on every dtype once, small and few enough for compute-sanitizer (scripts/gpu.py runs it over this file).

Beside it PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes each tensor an allocation of its own, so that its ends are watched.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tests.gpu.test_kernel_flatten import assert_same_packing, cut_and_placed
from tests.gpu.test_kernel_norm import random_shard, words_of
from tests.gpu.test_kernel_reduce import Reduction, assert_same_reduction
from tests.gpu.test_kernel_rows import KINDS, RULES, assert_rows_updated_as_on_the_cpu
from tests.gpu.test_kernel_update import COMBINATIONS, assert_same_step, ragged_shard
from tests.gpu.twins import Fences, mixed_options, random_bits
from tests.kernels.rule import VARIANTS
from tests.kernels.shards import DTYPES, same_bits, segments_of
from zerox import ops

NUMELS = [0, 1, 9, 257, 4096]
OFFSETS = [0, 1]


@pytest.mark.parametrize("offset", OFFSETS)
def test_flatten(device: torch.device, seed: int, offset: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for source, to in itertools.product(DTYPES, DTYPES):
        sources = [torch.randn(n, generator=generator).to(source) for n in NUMELS]
        assert_same_packing(sources, *cut_and_placed(rng, NUMELS), to, offset, device)
    assert_same_packing([], torch.empty(0, 4, dtype=torch.int64), torch.tensor([3]), 100, torch.float32, 0, device)


@pytest.mark.parametrize("offset", OFFSETS)
def test_reduce(device: torch.device, seed: int, offset: int) -> None:
    segments = segments_of(*NUMELS, gap=3)
    numel = int(segments[-1, 1]) + 5
    for dtype, world, accumulate in itertools.product(DTYPES, [1, 3], [False, True]):
        assert_same_reduction(Reduction(seed, dtype, world, segments, numel, accumulate), device, offset)


def test_read_flags(device: torch.device, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for dtype in DTYPES:
        slices = [torch.randint(0, 2, (7 + 2 * 300,), generator=generator).to(dtype) for _ in range(3)]
        before, fences = random_bits(300, torch.uint8, generator) % 2, Fences(device)
        present, replaced = fences.put(before), fences.room(300, torch.uint8)
        ops.read_flags_(present, replaced, [fences.put(s) for s in slices], 7)
        expected, expected_replaced = before.clone(), before.clone()
        ops.read_flags_(expected, expected_replaced, slices, 7)
        assert torch.equal(present.cpu(), expected)
        assert torch.equal(replaced.cpu(), expected_replaced)
        fences.check()


@pytest.mark.parametrize("offset", OFFSETS)
def test_norm(device: torch.device, seed: int, offset: int) -> None:
    segments = segments_of(*NUMELS, gap=3)
    numel = int(segments[-1, 1])
    for dtype, p in itertools.product(DTYPES, [1.0, 2.0, 3.0, math.inf]):
        shard, fences = random_shard(seed, numel, dtype), Fences(device)
        words = words_of(fences.put(shard, offset), fences.put(segments), p)
        value = ops.norm_value(words, p).cpu()
        if p != 3.0:
            assert same_bits(value, ops.norm_value(words_of(shard, segments, p), p))
        fences.check()


@pytest.mark.parametrize("offset", OFFSETS)
def test_update(device: torch.device, seed: int, offset: int) -> None:
    for (dtype, master, grad_dtype), variant in itertools.product(COMBINATIONS, VARIANTS):
        shard = ragged_shard(seed, dtype, master, grad_dtype, variant)
        assert_same_step(shard, mixed_options(variant[0]), 0.37, offset, device)


def test_rows(device: torch.device, seed: int) -> None:
    for name, kind, (width, offset) in itertools.product(RULES, KINDS, [(33, 0), (64, 1), (64, 0)]):
        assert_rows_updated_as_on_the_cpu(device, seed, name, kind, width, offset, 0.25)
