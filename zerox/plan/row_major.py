"""Where a rectangle of a tensor lies in a file that has the tensor row by row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, Iterator[int]]:
    """How many of its elements lie together, and where each such run begins, counted in elements.

    ``shape``: of the whole tensor, in which the rectangle of ``sizes`` begins at ``offsets``. Runs come in the order
    of the rectangle's own elements, row by row.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    while outer > 0:  # dimensions from here on are whole
        outer -= 1
        if sizes[outer] != shape[outer]:
            break
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    steps = [range(0, size * stride, stride) for size, stride in zip(sizes[:outer], strides[:outer], strict=True)]
    return math.prod(sizes[outer:]), (first + sum(each) for each in itertools.product(*steps))


def boxes(sizes: Sequence[int], most_numel: int) -> Iterator[tuple[list[int], list[int]]]:
    """(offsets, sizes) of smaller rectangles that make up one of ``sizes``, of ``most_numel`` elements or fewer each,
    row by row."""
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if math.prod(sizes) <= most_numel or dim == len(sizes):
        if math.prod(sizes):
            yield [0] * len(sizes), list(sizes)
        return
    count = max(1, most_numel // math.prod(sizes[dim + 1 :]))
    for start in range(0, sizes[dim], count):
        part = [*sizes[:dim], min(count, sizes[dim] - start), *sizes[dim + 1 :]]
        for offsets, extent in boxes(part, most_numel):
            offsets[dim] += start
            yield offsets, extent
