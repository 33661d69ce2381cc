"""Packing a bucket: pieces of gradients to their places, cast, with zeros everywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.shards import DTYPES, same_bits
from zerox import ops


def table(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)


def poisoned(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel,), torch.nan, dtype=dtype)


def flags(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int64)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_pieces_are_cast_as_torch_casts(source: torch.dtype, to: torch.dtype) -> None:
    torch.manual_seed(0)
    sources = [torch.randn(n, dtype=torch.float64).mul(3e4).to(source) for n in (1000, 1, 333)]
    sources[0][:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=source)
    flat = poisoned(1500, to)
    # The first is cut in two around the others; nothing fills the rest.
    rows = [[0, 0, 5, 600], [1, 0, 605, 1], [2, 0, 610, 333], [0, 600, 1000, 400]]
    ops.flatten_(flat, sources, table(rows), flags(2, 1499))
    expected = torch.zeros(1500, dtype=to)
    for index, start, place, numel in rows:
        expected[place : place + numel] = sources[index][start : start + numel].to(to)
    expected[[2, 1499]] = 1.0
    assert torch.equal(flat.isnan(), expected.isnan())
    assert same_bits(flat.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 17, 255, 256, 257])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tails_and_odd_starts_write_their_span_only(numel: int, offset: int) -> None:
    source = torch.arange(1.0, 301.0)
    flat = poisoned(400, torch.bfloat16)
    ops.flatten_(flat, [source], table([[0, offset, 7 + offset, numel]]), flags())
    expected = torch.zeros(400, dtype=torch.bfloat16)
    expected[7 + offset : 7 + offset + numel] = source[offset : offset + numel].bfloat16()
    assert same_bits(flat, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_pieces_are_copied_in_parts_by_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    sources = [torch.randn(n) for n in (3 * 65536 + 1, 65536, 2 * 65536 - 1)]
    rows = [[0, 0, 3, 3 * 65536 + 1], [1, 0, 200_000, 65536], [2, 7, 300_000, 2 * 65536 - 8]]
    flat = poisoned(450_000, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops.flatten_(flat, sources, table(rows), flags())
    finally:
        torch.set_num_threads(before)
    expected = torch.zeros(450_000, dtype=torch.bfloat16)
    for index, start, place, numel in rows:
        expected[place : place + numel] = sources[index][start : start + numel]
    assert same_bits(flat, expected)


def test_a_bucket_without_gradients_is_zero() -> None:
    flat = poisoned(1000, torch.float32)
    ops.flatten_(flat, [], table([]), flags(999))
    assert flat[:999].count_nonzero() == 0
    assert flat[999] == 1.0


def test_dense_sources_are_taken_in_memory_order() -> None:
    source = torch.arange(24.0).view(4, 6).t()
    flat = poisoned(24, torch.float32)
    ops.flatten_(flat, [source], table([[0, 0, 0, 24]]), flags())
    assert torch.equal(flat, torch.arange(24.0))
    with pytest.raises(ValueError, match="`sources` must be dense"):
        ops.flatten_(flat, [torch.ones(4, 6)[:, :3]], table([[0, 0, 0, 12]]), flags())
