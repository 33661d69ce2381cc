"""Two lists of cases without their whole product: all of one beside the hardest of the other, and few beside the rest.

For cases that don't know of each other: how a number of ranks cuts a bucket does not depend on what is stored in it,
nor what a rank that has run out does on how a gradient is clipped. tests/optimizer/test_bit_equality.py argues so, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def thinned(ones: Iterable[A], few: Collection[A], others: Iterable[B], hardest: Collection[B]) -> list[tuple[A, B]]:
    """``few`` of ``ones`` with all ``others``, all of them with the ``hardest``."""
    ones, others = list(ones), list(others)
    assert all(each in ones for each in few), "few are some of all"
    assert all(each in others for each in hardest), "the hardest are some of all"
    return [(one, other) for one in ones for other in others if one in few or other in hardest]
