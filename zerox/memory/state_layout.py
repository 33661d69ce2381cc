"""Where the state under one key lies in a bucket's shards: as parameters do, or by itself if there is less of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from zerox.memory.flat import FlatBuffer
from zerox.plan.cut import dense
from zerox.plan.layout import Layout, Segment
from zerox.plan.span import Span
from zerox.plan.state_layout import Shape

NOWHERE = Segment(-1, Span(0, 0), 0)  # the part of a rank that has no elements of a parameter


class StateLayout(NamedTuple):
    """``own``: this rank's segments, row by row as those of the parameters. ``shapes`` and ``strides``: by slot, of
    whole tensors. No shape: the parameter has no such state."""

    layout: Layout
    own: Sequence[Segment]
    shapes: Sequence[Shape | None]
    strides: Sequence[Shape]

    def segment(self, row: int) -> Segment:
        """``row``: -1 if this rank has none."""
        return self.own[row] if row >= 0 else NOWHERE

    def view(self, slot: int, own: Tensor) -> Tensor:
        """A whole tensor, from its elements."""
        return own.as_strided(self.shapes[slot] or (), self.strides[slot], own.storage_offset())


def by_itself(layout: Layout, rank: int, shapes: Sequence[Shape | None], params: FlatBuffer) -> StateLayout:
    """Of state with these shapes: it lies as its parameter does where it has that one's shape, else row-major."""
    strides = [
        param_strides if shape == tuple(param) else row_major(shape or ())
        for shape, param, param_strides in zip(shapes, params.shapes, params.strides, strict=True)
    ]
    return StateLayout(layout, layout.segments(rank), shapes, strides)


def row_major(shape: Shape) -> Shape:
    """Strides."""
    return dense(shape, range(len(shape)))
