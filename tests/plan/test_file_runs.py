"""Rectangles in row-major files: runs and slabs have each element once, in order, and no run could be longer."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from zerox.plan.file_runs import Place, overlap, row_major, runs, slabs


def numbers_in(shape: tuple[int, ...], place: Place) -> list[int]:
    """Of a rectangle's elements in a row-major tensor, in the rectangle's own order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = (range(at, at + size) for at, size in zip(*place, strict=True))
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*ranges)]


def drawn(rng: random.Random) -> tuple[tuple[int, ...], Place]:
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
    offsets = tuple(rng.randrange(size) for size in shape)
    return shape, (offsets, tuple(rng.randint(1, size - at) for at, size in zip(offsets, shape, strict=True)))


def test_runs_are_the_rectangles_elements_in_its_order() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        shape, place = drawn(rng)
        found = list(runs(shape, place))
        assert [i for first, numel in found for i in range(first, first + numel)] == numbers_in(shape, place)
        if all(sizes == whole for sizes, whole in zip(place[1], shape, strict=True)):
            assert found == [(0, math.prod(shape))]


def test_whole_rows_are_one_run() -> None:
    assert list(runs((7, 3, 4), ((2, 0, 0), (4, 3, 4)))) == [(24, 48)]
    assert list(runs((7, 3, 4), ((2, 1, 0), (1, 2, 4)))) == [(28, 8)]
    assert list(runs((7, 3, 4), ((2, 0, 1), (2, 2, 3)))) == [(25, 3), (29, 3), (37, 3), (41, 3)]
    assert list(runs((), ((), ()))) == [(0, 1)]


def test_pieces_of_a_tensor_that_lies_in_any_way_are_its_elements() -> None:
    """Each element of the rectangle once, at its place, whatever the strides."""
    rng = random.Random(3)
    met = 0
    for _ in range(2000):
        shape, place = drawn(rng)
        order = rng.sample(range(len(shape)), len(shape))
        strides, numel = [0] * len(shape), 1
        for dim in order:
            strides[dim] = 0 if rng.random() < 0.1 else numel
            numel *= shape[dim] + (rng.randint(0, 2) if rng.random() < 0.3 else 0)
        found = {}
        pieces = list(row_major(shape, strides, place))
        for piece in pieces:
            inside = itertools.product(*map(range, piece.place[1]))
            for at, number in zip(inside, numbers_in(piece.shape, piece.place), strict=True):
                index = piece.at | dict(zip(piece.dims, at, strict=True))
                where = tuple(index[dim] for dim in range(len(shape)))
                assert where not in found
                found[where] = piece.first + number
        assert found == {
            where: sum((i + first) * stride for i, first, stride in zip(where, place[0], strides, strict=True))
            for where in itertools.product(*map(range, place[1]))
        }
        met += len(pieces) > 1
    assert 100 < met < 1900


def test_a_dense_tensor_is_one_piece() -> None:
    for shape, strides in (((4, 5), (1, 4)), ((2, 3, 4, 5), (60, 1, 15, 3)), ((7, 1, 2), (2, 99, 1)), ((), ())):
        place = (0,) * len(shape), shape
        assert len(list(row_major(shape, strides, place))) == 1
    assert len(list(row_major((6, 4), (0, 1), ((0, 0), (6, 4))))) == 6  # expanded, row by row


def test_slabs_follow_each_other_and_are_small() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        _shape, (_, sizes) = drawn(rng)
        most = rng.randint(1, 40)
        found = list(slabs(sizes, most))
        assert all(math.prod(each) <= most for _, each in found)
        inside = [i for place in found for i in numbers_in(sizes, place)]
        assert inside == list(range(math.prod(sizes)))


@pytest.mark.parametrize("most", [64, 100, 10**9])
def test_slabs_are_as_large_as_they_may_be(most: int) -> None:
    assert len(list(slabs((16, 8, 8), most))) == {64: 16, 100: 16, 10**9: 1}[most]


def test_an_overlap_is_what_both_have() -> None:
    rng = random.Random(2)
    met = 0
    for _ in range(2000):
        shape, one = drawn(rng)
        offsets = tuple(rng.randrange(size) for size in shape)
        other = offsets, tuple(rng.randint(1, size - at) for at, size in zip(offsets, shape, strict=True))
        common = overlap(one, other)
        expected = sorted({*numbers_in(shape, one)} & {*numbers_in(shape, other)})
        assert ([] if common is None else numbers_in(shape, common)) == expected
        met += common is not None
    assert 200 < met < 1800
