"""Lines that ranks compare: which differ, and the number that stands for all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def line_of(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else "nothing"


def first_difference(lines: Sequence[str], others: Sequence[str]) -> int | None:
    most = max(len(lines), len(others))
    return next((index for index in range(most) if line_of(lines, index) != line_of(others, index)), None)


def first_that_differs(everyone: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """The first rank whose lines are not rank 0's, and the place of the first that is not."""
    for rank, theirs in enumerate(everyone):
        if (index := first_difference(everyone[0], theirs)) is not None:
            return rank, index
    return None


def digest(text: str) -> int:
    """Which a float64 holds too; not 0."""
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
