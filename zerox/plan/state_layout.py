"""The layout of state of which a parameter has less than one number for each element."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerox.plan.layout import Layout

Shape = tuple[int, ...]


def layout_of_state(layout: Layout, params: Sequence[Shape], shapes: Sequence[Shape | None]) -> Layout | None:
    """Of state with these ``shapes``, of parameters that lie whole on one rank: with the same owners. None: it lies as
    the parameters do, whose shapes it has."""
    if list(shapes) == list(params):
        return None
    assert layout.owners is not None, "only of whole parameters state can have another shape"
    numels = tuple(0 if shape is None else math.prod(shape) for shape in shapes)
    return Layout(numels, layout.world_size, layout.start_align, layout.owners)
