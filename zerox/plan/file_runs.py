"""Rectangles of tensors that lie row-major in files: what two have in common, and where one's elements lie together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

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
