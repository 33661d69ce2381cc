"""Which ranks own the parameters that lie whole on one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """What a rank's own parameters cost in one update, and how many elements they have."""

    cost: int = 0
    numel: int = 0

    def plus(self, cost: int, numel: int) -> Load:
        return Load(self.cost + cost, self.numel + numel)


def slowest_over_mean(loads: Sequence[Load]) -> float:
    """The costliest rank's cost beside the mean of all: 1 where they are equal, or have none."""
    total = sum(load.cost for load in loads)
    return max(load.cost for load in loads) * len(loads) / total if total else 1.0


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Floating-point operations of five iterations on a matrix: each has the products of an m by n matrix (m the
    shorter side) with its transpose, of two m by m matrices, and of one of these with the first."""
    m, n = min(rows, columns), max(rows, columns)
    return 5 * (4 * m * m * n + 2 * m**3)


def owners(
    costs: Sequence[int], numels: Sequence[int], world_size: int, loads: Sequence[Load] | None = None
) -> tuple[int, ...]:
    """A rank for each parameter, so that no rank has much more to compute than the others.

    The costliest goes first, each to the rank that has least so far: of equal costs the longer one first, of equally
    loaded ranks the one with fewer elements, then the first. ``loads``: what ranks have already. Ranks that pass the
    same get the same.
    """
    loads = [Load()] * world_size if loads is None else loads
    assert len(costs) == len(numels), f"{len(costs)} costs of {len(numels)} parameters"
    assert len(loads) == world_size, f"{len(loads)} loads of {world_size} ranks"
    least = [(*load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    found = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], -numels[place], place)):
        cost, numel, rank = least[0]
        found[place] = rank
        heapq.heapreplace(least, (cost + costs[place], numel + numels[place], rank))
    return tuple(found)


WHOLE = ("none", "matrices", "all")  # which parameters of a class of torch's kind lie whole on one rank


def cost_of_whole(whole: str, shape: Sequence[int]) -> int | None:
    """What the update of a parameter counts for, if ``whole`` (of ``WHOLE``) leaves it whole on one rank; else None.

    A matrix is what has two dimensions or more: those behind the first count as one. Nobody knows what a class computes
    for it. Newton-Schulz steps are what costs most by far, and under "all" it is the number of elements.
    """
    if whole == "matrices" and len(shape) > 1:
        return newton_schulz_cost(shape[0], math.prod(shape[1:]))
    return math.prod(shape) if whole == "all" else None
