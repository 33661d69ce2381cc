"""A flat range of an N-D tensor as rectangles of it: so a checkpoint describes a rank's part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerox.plan.cut import slowest_first
from zerox.plan.span import Span


@dataclass(frozen=True)
class Rectangle:
    """Elements from ``offsets`` on, ``sizes`` of them in each dimension. ``span``: where they are in memory order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


def rectangles(shape: Sequence[int], strides: Sequence[int], span: Span) -> list[Rectangle]:
    """Rectangles that make up ``span``, elements of a dense tensor in memory order: ``2 * ndim - 1`` at most, in order.

    In memory each is contiguous: of its dimensions, slowest first, some have one index, one has a range of them, and
    all behind that one are whole.
    """
    if span.numel == 0:
        return []
    dims = slowest_first(shape, strides)
    found = []
    for offsets, sizes, start in _of_rows([shape[dim] for dim in dims], span.start, span.stop):
        place, extent = [0] * len(shape), [0] * len(shape)
        for dim, offset, size in zip(dims, offsets, sizes, strict=True):
            place[dim], extent[dim] = offset, size
        found.append(Rectangle(tuple(place), tuple(extent), Span(start, start + math.prod(sizes))))
    return found


def _of_rows(shape: Sequence[int], start: int, stop: int) -> list[tuple[list[int], list[int], int]]:
    """(offsets, sizes, first element) of a row-major tensor's range: part of a row, whole rows, part of a row."""
    if not shape:
        return [([], [], start)]
    row_numel = math.prod(shape[1:])
    found = []
    while start < stop:
        row, in_row = divmod(start, row_numel)
        whole_rows = (stop - start) // row_numel
        if in_row == 0 and whole_rows > 0:
            found.append(([row, *(0 for _ in shape[1:])], [whole_rows, *shape[1:]], start))
            start += whole_rows * row_numel
        else:
            end = min(stop, (row + 1) * row_numel)
            begin = row * row_numel
            for offsets, sizes, first in _of_rows(shape[1:], start - begin, end - begin):
                found.append(([row, *offsets], [1, *sizes], first + begin))
            start = end
    return found
