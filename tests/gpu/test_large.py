"""Shards of more than 2^32 elements: what a 32-bit index would get wrong lies behind 2^31 and behind 2^32.

Everything is compared with the same kernel on chunks that no index can leave, and windows around the powers of two and
the ends with the CPU kernel. ZEROX_TEST_DEVICE=cpu runs it all at a 65,536th of the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu.twins import CPU, DEVICE, POISON
from tests.kernels.shards import options_table, same_bits, segments_of, split
from zerox import ops

GIB = 2**30
POWER = 31 if DEVICE.type == "cuda" else 15
TOTAL = 2 * 2**POWER + 1000 + 77  # ends in a part of a vector, a warp's block and a tile
CHUNK = 2 ** (POWER - 3)
WINDOW = 4096


def needs(bytes_an_element: int) -> None:
    """Skips where so much for each of TOTAL elements, and what chunks take, is not free."""
    if DEVICE.type != "cuda":
        return
    torch.cuda.empty_cache()
    needed, free = TOTAL * bytes_an_element + CHUNK * 40, torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} are free")


@pytest.fixture(autouse=True)
def _memory_back() -> Iterator[None]:
    yield
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def chunks() -> Iterator[tuple[int, int]]:
    for start in range(0, TOTAL, CHUNK):
        yield start, min(start + CHUNK, TOTAL)


def windows() -> list[tuple[int, int]]:
    """Around the powers of two, and at both ends. Each lies in at most two chunks."""
    marks = [0, 2**POWER, 2 * 2**POWER, TOTAL]
    return [(max(0, mark - WINDOW), min(TOTAL, mark + WINDOW)) for mark in marks]


def random_chunk(seed: int, index: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers whenever they are asked for."""
    generator = torch.Generator(DEVICE).manual_seed(seed * 1000 + index)
    return torch.randn(numel, generator=generator, device=DEVICE).to(dtype)


def poisoned(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel * dtype.itemsize,), POISON, dtype=torch.uint8, device=DEVICE).view(dtype)


def filled(seed: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(TOTAL, dtype=dtype, device=DEVICE)
    for index, (start, stop) in enumerate(chunks()):
        tensor[start:stop] = random_chunk(seed, index, stop - start, dtype)
    return tensor


def words(device: torch.device = DEVICE) -> Tensor:
    return torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=device)


def byte(value: int, device: torch.device = DEVICE) -> Tensor:
    return torch.full((1,), value, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32], ids=["cast", "copied"])
def test_flatten(device: torch.device, seed: int, to: torch.dtype) -> None:
    """One source in two pieces around a gap behind 2^31, each started off the alignment of its place."""
    needs(4 + to.itemsize)
    source = filled(seed, torch.float32)
    first, gap = 2**POWER + 5, 7
    pieces = torch.tensor([[0, 1, 0, first], [0, first + 1, first + gap, TOTAL - first - 1]])
    flat = poisoned(TOTAL + gap, to)
    ops.flatten_(flat, [source], pieces, torch.tensor([first + 2, TOTAL + gap - 1]))
    expected_gap = torch.zeros(gap, dtype=to)
    expected_gap[2] = 1.0
    assert same_bits(flat[first : first + gap].cpu(), expected_gap)
    assert float(flat[-1]) == 1.0
    for start, stop in chunks():
        for _, source_start, place, numel in pieces.tolist():
            a, b = max(start, source_start), min(stop, source_start + numel)
            if a < b:
                there = flat[a - source_start + place : b - source_start + place]
                assert torch.equal(there, source[a:b].to(to)), f"elements [{a}, {b}) of the source"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_reduce_and_norm(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    """Two slices and three segments; the words are those of the chunks, added up."""
    needs(3 * dtype.itemsize)
    slices = [filled(seed, dtype), filled(seed + 1, dtype)]
    shard, sums = poisoned(TOTAL, dtype), words()
    # Ends at multiples of a norm's block, so that chunks and segments have the same blocks.
    cut = 2**POWER + 256 * 3
    segments = segments_of(cut, TOTAL - cut)
    replaced = torch.zeros(2, dtype=torch.uint8, device=device)
    ops.reduce_(shard, sums, slices, segments.to(device), replaced, 2, False)

    by_chunk = {p: words() for p in (1.0, 2.0, math.inf)}
    for start, stop in chunks():
        part = [each[start:stop] for each in slices]
        assert torch.equal(shard[start:stop], ((part[0].float() + part[1].float()) / 2).to(dtype)), f"from {start}"
        for p, total in by_chunk.items():
            for a, b in ((start, min(stop, cut)), (max(start, cut), stop)):
                if a < b:
                    ops.norm_(total, shard[a:b], segments_of(b - a).to(device), p)
    assert torch.equal(sums, by_chunk[2.0])
    for p, total in by_chunk.items():
        whole = words()
        ops.norm_(whole, shard, segments.to(device), p)
        assert torch.equal(whole, total), f"order {p}"
    for start, stop in windows():
        ours, theirs = poisoned(stop - start, dtype).cpu(), words(CPU)
        part = [each[start:stop].cpu() for each in slices]
        ops.reduce_(ours, theirs, part, segments_of(stop - start), byte(0, CPU), 2, False)
        assert same_bits(ours, shard[start:stop].cpu())


class Part:
    """Some elements of a shard of bf16 parameters with remainders, as they are before the step."""

    dtypes = (
        ("param", torch.bfloat16),
        ("master", torch.int16),
        ("grad", torch.bfloat16),
        ("exp_avg", torch.float32),
        ("exp_avg_sq", torch.float32),
    )

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.param, self.master, self.grad, self.exp_avg, self.exp_avg_sq = (tensors[name] for name, _ in self.dtypes)

    @classmethod
    def room(cls, numel: int) -> Part:
        return cls({name: torch.empty(numel, dtype=dtype, device=DEVICE) for name, dtype in cls.dtypes})

    @classmethod
    def random(cls, seed: int, index: int, numel: int) -> Part:
        param, master = split(random_chunk(seed, 10 * index, numel))
        grad = random_chunk(seed, 10 * index + 1, numel, torch.bfloat16)
        exp_avg = random_chunk(seed, 10 * index + 2, numel).mul_(0.1)
        exp_avg_sq = random_chunk(seed, 10 * index + 3, numel).square_().mul_(0.1)
        return cls({"param": param, "master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})

    def __getitem__(self, window: slice) -> Part:
        return Part({name: getattr(self, name)[window] for name, _ in self.dtypes})

    def cpu(self) -> Part:
        return Part({name: getattr(self, name).to("cpu", copy=True) for name, _ in self.dtypes})

    def copy_(self, other: Part) -> None:
        for name, _ in self.dtypes:
            getattr(self, name).copy_(getattr(other, name))

    def equals(self, other: Part) -> bool:
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name, _ in self.dtypes)


def update(of: Part, segments: Tensor) -> None:
    device, count = of.param.device, len(segments)
    present = torch.ones(count, dtype=torch.uint8, device=device)
    steps = torch.full((count,), 10, dtype=torch.int64, device=device)
    tables = (segments.to(device), present, steps)
    shard = ops.Shard(of.param, of.master, of.grad, [of.exp_avg, of.exp_avg_sq], [], *tables)
    ops.update_("adam", [shard], options_table().to(device))


def test_adam(device: torch.device, seed: int) -> None:
    """bf16 parameters with remainders: 14 bytes an element, so that a GPU of 80 GB holds them."""
    needs(14)
    whole = Part.room(TOTAL)
    for index, (start, stop) in enumerate(chunks()):
        whole[start:stop].copy_(Part.random(seed, index, stop - start))
    cut = 2**POWER + 12_345
    update(whole, segments_of(cut, TOTAL - cut))

    compared_with_cpu = 0
    for index, (start, stop) in enumerate(chunks()):
        part = Part.random(seed, index, stop - start)
        for first, last in windows():
            inside = slice(max(first, start) - start, min(last, stop) - start)
            if inside.start < inside.stop:
                on_cpu = part[inside].cpu()
                update(on_cpu, segments_of(len(on_cpu.param)))
                there = whole[start + inside.start : start + inside.stop].cpu()
                assert there.equals(on_cpu), f"window around [{first}, {last})"
                compared_with_cpu += len(on_cpu.param)
        update(part, segments_of(stop - start))
        assert whole[start:stop].equals(part), f"elements [{start}, {stop})"
        del part
    assert compared_with_cpu == sum(last - first for first, last in windows())
