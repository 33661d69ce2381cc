"""Rectangles of tensors that lie row-major in files: what two have in common, and where one's elements lie together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def overlap(one: Place, other: Place) -> Place | None:
    """The elements that two rectangles of one tensor have in common, or None."""
    starts = tuple(map(max, one[0], other[0]))
    stops = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def runs(shape: Sequence[int], place: Place) -> Iterator[tuple[int, int]]:
    """Where elements of a rectangle lie together in a row-major tensor: (first element, how many), in its own order."""
    offsets, sizes = place
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    behind = len(shape)  # dimensions from here on are whole, and lie together
    while behind > 0 and sizes[behind - 1] == shape[behind - 1]:
        behind -= 1
    ranged = max(behind - 1, 0)  # of this one a range lies together
    numel = math.prod(sizes[ranged:])
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in itertools.product(*map(range, sizes[:ranged])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), numel


class Piece(NamedTuple):
    """Elements that are a rectangle of a row-major tensor of ``shape``, which begins at element ``first`` of a file.
    They are those ``at`` these places of its leading dimensions, and its other ones in the order ``dims``."""

    first: int
    at: dict[int, int]
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


def row_major(shape: Sequence[int], strides: Sequence[int], place: Place) -> Iterator[Piece]:
    """A rectangle of a tensor that lies by any ``strides``: of its dimensions in the order of memory, the last that lie
    together stay together. A transposed tensor or one that is channels last is one piece, an expanded one several."""
    wide = [dim for dim in range(len(shape)) if shape[dim] != 1]
    order = sorted(wide, key=lambda dim: (strides[dim] != 0, -strides[dim]))
    numel = 1
    behind: list[int] = []
    while order and strides[order[-1]] == numel:
        behind.insert(0, order.pop())
        numel *= shape[behind[0]]
    leading = [dim for dim in range(len(shape)) if dim not in behind]
    ranges = [range(place[0][dim], place[0][dim] + place[1][dim]) for dim in leading]
    inside = tuple(place[0][dim] for dim in behind), tuple(place[1][dim] for dim in behind)
    for each in itertools.product(*ranges):
        index = {dim: at - place[0][dim] for dim, at in zip(leading, each, strict=True)}
        first = sum(at * strides[dim] for dim, at in zip(leading, each, strict=True))
        yield Piece(first, index, tuple(behind), tuple(shape[dim] for dim in behind), inside)


def slabs(sizes: Sequence[int], most: int) -> Iterator[Place]:
    """A rectangle cut into ones of at most ``most`` elements, which follow each other in row-major order."""
    if math.prod(sizes) <= most:
        yield (0,) * len(sizes), tuple(sizes)
        return
    row_numel = math.prod(sizes[1:])
    step = max(1, most // row_numel)
    for start in range(0, sizes[0], step):
        count = min(step, sizes[0] - start)
        for offsets, inside in slabs(sizes[1:], most) if row_numel > most else [((0,) * (len(sizes) - 1), sizes[1:])]:
            yield (start, *offsets), (count, *inside)
