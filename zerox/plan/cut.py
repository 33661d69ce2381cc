"""Where the part of a tensor that a rank has lies in the whole one, if tensor parallelism cut it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """``shape``: of the whole tensor; ``offsets``: of this rank's part in it, in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def place_offsets(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """Where in the whole tensor something is that is there in the part."""
        return tuple(own + inside for own, inside in zip(self.offsets, offsets, strict=True))


def dense(shape: Sequence[int], slowest_first: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions lie in this order."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(slowest_first):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def slowest_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions in their order in memory; of those with one stride, one of a single index comes last."""
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1))


def complete_order(order: Sequence[int] | None, num_dims: int) -> list[int]:
    """All dimensions, slowest first, from the ``order`` of a checkpoint, which leaves out those of one index."""
    known = order or ()
    return [*known, *(dim for dim in range(num_dims) if dim not in known)]
