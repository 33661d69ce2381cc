"""Half-open ranges: sizes, overlaps, alignment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerox.plan.span import Span, align_up

spans = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda ends: Span(min(ends), max(ends)))


@given(spans, spans)
def test_an_overlap_holds_exactly_the_elements_that_both_have(a: Span, b: Span) -> None:
    both = set(range(a.start, a.stop)) & set(range(b.start, b.stop))
    overlap = a.overlap(b)
    if both:
        assert overlap is not None
        assert set(range(overlap.start, overlap.stop)) == both
    elif a.numel > 0:
        assert overlap is None


@given(spans, spans)
def test_an_overlap_of_non_empty_spans_is_symmetric(a: Span, b: Span) -> None:
    if a.numel and b.numel:
        assert a.overlap(b) == b.overlap(a)


@given(st.integers(0, 40), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_an_empty_span_lies_in_exactly_one_of_adjacent_spans(start: int, numels: list[int]) -> None:
    empty, begin, holders = Span(start, start), 0, 0
    for numel in numels:
        overlap = empty.overlap(Span(begin, begin + numel))
        holders += overlap is not None
        assert overlap in (None, empty)
        begin += numel
    assert holders == (1 if start < begin else 0)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (-2, -1)])
def test_an_impossible_span_is_refused_with_both_ends(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\)"):
        Span(start, stop)


@given(st.integers(0, 10**15), st.integers(1, 10**6))
def test_align_up_is_the_smallest_multiple_that_is_not_below(numel: int, multiple: int) -> None:
    aligned = align_up(numel, multiple)
    assert aligned % multiple == 0
    assert numel <= aligned < numel + multiple
