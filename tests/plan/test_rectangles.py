"""A flat range as rectangles: each of its elements once, in memory order, in few of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerox.plan.rectangles import rectangles
from zerox.plan.span import Span


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], list[int], Span]:
    """A shape, the strides of one of its dense layouts, and a span of its elements."""
    shape = draw(st.lists(st.integers(1, 5), max_size=5))
    order = draw(st.permutations(range(len(shape))))
    strides, stride = [0] * len(shape), 1
    for dim in order:
        strides[dim] = stride
        stride *= shape[dim]
    start = draw(st.integers(0, math.prod(shape)))
    return shape, strides, Span(start, draw(st.integers(start, math.prod(shape))))


@given(ranges())
def test_they_hold_each_element_once_in_memory_order(drawn: tuple[list[int], list[int], Span]) -> None:
    shape, strides, span = drawn
    memory = torch.arange(math.prod(shape))
    tensor = memory.as_strided(shape, strides)
    found = rectangles(shape, strides, span)
    seen = []
    for each in found:
        slices = tuple(slice(o, o + s) for o, s in zip(each.offsets, each.sizes, strict=True))
        held = memory[each.span.start : each.span.stop]
        assert sorted(tensor[slices].reshape(-1).tolist()) == held.tolist()
        seen += held.tolist()
    assert seen == memory[span.start : span.stop].tolist()
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "span", "expected"),
    [
        ((), Span(0, 1), [((), ())]),
        ((7,), Span(2, 5), [((2,), (3,))]),
        ((4, 3), Span(0, 12), [((0, 0), (4, 3))]),
        ((4, 3), Span(2, 10), [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]),
        ((4, 3), Span(4, 5), [((1, 1), (1, 1))]),
        ((2, 2, 2), Span(1, 6), [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 1, 2)), ((1, 0, 0), (1, 1, 2))]),
        ((3, 0), Span(0, 0), []),
    ],
)  # fmt: skip
def test_what_it_is_by_hand(shape: tuple[int, ...], span: Span, expected: list[object]) -> None:
    strides = torch.empty(shape).stride()
    assert [(each.offsets, each.sizes) for each in rectangles(shape, strides, span)] == expected


def test_the_order_of_memory_is_the_tensor_s() -> None:
    """Channels last: two pixels of all channels are one rectangle."""
    strides = torch.empty(1, 8, 4, 4).to(memory_format=torch.channels_last).stride()
    [found] = rectangles((1, 8, 4, 4), strides, Span(8, 24))
    assert (found.offsets, found.sizes) == ((0, 0, 0, 1), (1, 8, 1, 2))
