"""Parameters that lie whole on one rank: which one, so that no rank has much more to compute than the others."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerox.plan.owners import Load, owners

Shape = tuple[int, int]

GPT2 = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
LLAMA_8B = [
    *[(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)],
    *[(14336, 4096), (14336, 4096), (4096, 14336)],
] * 32


def newton_schulz(shape: Shape) -> int:
    """Operations of five steps, which Muon takes: two products with the m x m square and one with the matrix."""
    m, n = sorted(shape)
    return 5 * (4 * m * m * n + 2 * m**3)


def sums(values: Sequence[int], found: Sequence[int], world_size: int) -> list[int]:
    by_rank = [0] * world_size
    for value, rank in zip(values, found, strict=True):
        by_rank[rank] += value
    return by_rank


@pytest.mark.parametrize(
    ("shapes", "world_size", "most"), [(GPT2, 16, 1.15), (LLAMA_8B, 64, 1.10)], ids=["GPT-2 124 M", "Llama 8 B"]
)
def test_the_slowest_rank_is_near_the_mean_for_known_models(shapes: list[Shape], world_size: int, most: float) -> None:
    costs = [newton_schulz(shape) for shape in shapes]
    start = time.process_time()
    found = owners(costs, [m * n for m, n in shapes], world_size)
    assert time.process_time() - start < 1.0
    by_rank = sums(costs, found, world_size)
    assert max(by_rank) <= most * sum(by_rank) / world_size


many = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40)


@given(many, st.integers(1, 12))
def test_no_rank_has_more_than_a_greedy_deal_allows(params: list[tuple[int, int]], world_size: int) -> None:
    """Whoever is slowest had least when it got its last: so it is at most the mean and that one's cost."""
    costs = [cost for cost, _ in params]
    found = owners(costs, [numel for _, numel in params], world_size)
    by_rank = sums(costs, found, world_size)
    slowest = by_rank.index(max(by_rank))
    own = [cost for cost, rank in zip(costs, found, strict=True) if rank == slowest]
    assert max(by_rank) * world_size <= sum(costs) + (world_size - 1) * min(own, default=0)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 12))
def test_elements_decide_where_costs_are_equal(numels: list[int], world_size: int) -> None:
    by_rank = sums(numels, owners([0] * len(numels), numels, world_size), world_size)
    assert max(by_rank) - min(by_rank) <= max(numels, default=0)


@given(many, many, st.integers(1, 12))
def test_what_comes_later_goes_to_those_who_have_least(
    before: list[tuple[int, int]], after: list[tuple[int, int]], world_size: int
) -> None:
    """A later deal balances both together as well as a deal can that moves nothing."""
    costs, numels = ([each[i] for each in before] for i in (0, 1))
    first = owners(costs, numels, world_size)
    loads = [Load(*each) for each in zip(sums(costs, first, world_size), sums(numels, first, world_size), strict=True)]
    more = [cost for cost, _ in after]
    found = owners(more, [numel for _, numel in after], world_size, loads)
    added = sums(more, found, world_size)
    total = [load.cost + extra for load, extra in zip(loads, added, strict=True)]
    largest = max(more, default=0)
    assert all(extra == 0 or each - largest <= min(total) for each, extra in zip(total, added, strict=True))


def test_equal_parameters_go_round() -> None:
    assert owners([7] * 5, [3] * 5, 3) == (0, 1, 2, 0, 1)
    assert owners([7, 7], [3, 3], 3, [Load(9, 0), Load(1, 5), Load(1, 4)]) == (2, 1)
    assert owners([5, 9, 5], [1, 1, 2], 2) == (1, 0, 1)
    assert owners([], [], 3) == ()
