"""The order in which parameters on the meta device get their values: each once, while its bucket is whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerox.plan.materialize import Turn, largest, most_beside, most_open, turns

MODULES = [[0], [1, 2], [3], [], [0, 4]]
BUCKETS = [[4, 3], [0, 1], [2]]
NBYTES = [30, 20, 1]


def test_a_bucket_is_open_from_its_first_parameter_to_its_last() -> None:
    assert turns(MODULES, BUCKETS) == [
        Turn((1,), frozenset({1}), (1,), (), False),
        Turn((2,), frozenset({1, 2}), (1, 2), (1, 2), False),
        Turn((0,), frozenset({0}), (0,), (), False),
        Turn((), frozenset(), (0,), (), True),
        Turn((), frozenset({0}), (0,), (0,), True),
    ]


def test_what_is_open_beside_a_module_s_own_and_the_largest_module() -> None:
    found = turns(MODULES, BUCKETS)
    assert most_beside(found, NBYTES) == 30  # while the module without parameters is initialised
    assert largest(found, NBYTES) == (2, 30)
    assert most_open(found, NBYTES) == 30
    assert most_open(found, [1, 20, 30]) == 50  # at the second module
    assert most_beside([], []) == most_open([], []) == 0
    assert largest([], []) == (0, 0)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Each parameter in one bucket, and in one module or, tied, in several."""
    count = draw(st.integers(0, 12))
    of_modules = [draw(st.sets(st.integers(0, 5), min_size=1)) for _ in range(count)]
    of_buckets = [draw(st.integers(0, 4)) for _ in range(count)]
    modules = [[param for param in range(count) if module in of_modules[param]] for module in range(6)]
    buckets = [[param for param in range(count) if of_buckets[param] == bucket] for bucket in range(5)]
    return modules, [bucket for bucket in buckets if bucket]


@given(models())
def test_each_parameter_has_its_turn_in_an_open_bucket(made: tuple[list[list[int]], list[list[int]]]) -> None:
    modules, buckets = made
    bucket_of = {param: index for index, inside in enumerate(buckets) for param in inside}
    opened, closed, had = [], [], set()
    for params, turn in zip(modules, turns(modules, buckets), strict=True):
        opened += turn.opens
        assert {*turn.open} == {*opened} - {*closed}
        first = {*params} - had
        assert {bucket_of[param] for param in first} == turn.own <= {*turn.open}
        assert turn.goes_back == (not first or first != {*params})
        had |= first
        closed += turn.closes
        assert {*closed} == {index for index, inside in enumerate(buckets) if {*inside} <= had}
    assert sorted(opened) == sorted(closed) == [*range(len(buckets))], "each once"
