"""A rectangle in a row-major file: each of its elements once, in runs that are as long as they can be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerox.plan.row_major import boxes, runs


@st.composite
def rectangles(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, offsets, sizes


@given(rectangles())
def test_runs_have_each_element_once_in_order(drawn: tuple[list[int], list[int], list[int]]) -> None:
    shape, offsets, sizes = drawn
    whole = torch.arange(math.prod(shape)).reshape(shape)
    wanted = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
    numel, starts = runs(shape, offsets, sizes)
    found = list(starts)
    assert [start + place for start in found for place in range(numel)] == wanted
    first_cut = max((dim for dim in range(len(shape)) if sizes[dim] < shape[dim]), default=0)
    assert len(found) == math.prod(sizes[:first_cut]), "what is whole behind the last cut dimension lies together"


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "expected"),
    [
        ((), (), (), (1, [0])),
        ((7,), (2,), (3,), (3, [2])),
        ((4, 3), (0, 0), (4, 3), (12, [0])),
        ((4, 3), (1, 0), (2, 3), (6, [3])),
        ((4, 3), (1, 1), (2, 2), (2, [4, 7])),
        ((2, 3, 4), (0, 1, 0), (2, 1, 4), (4, [4, 16])),
    ],
)  # fmt: skip
def test_what_they_are_by_hand(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], expected: tuple[int, list[int]]
) -> None:
    numel, starts = runs(shape, offsets, sizes)
    assert (numel, list(starts)) == expected


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40))
def test_boxes_are_small_and_have_each_element_once_in_order(sizes: list[int], most: int) -> None:
    whole = torch.arange(math.prod(sizes)).reshape(sizes)
    seen = []
    for offsets, extent in boxes(sizes, most):
        assert 0 < math.prod(extent) <= most
        seen += whole[tuple(slice(o, o + s) for o, s in zip(offsets, extent, strict=True))].reshape(-1).tolist()
    assert seen == list(range(math.prod(sizes)))
