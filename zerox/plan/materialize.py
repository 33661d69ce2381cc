"""In which order parameters on the meta device get their first values: module by module, while their buckets are whole.

    modules     0          1          2          3
    bucket A    a          b                                opens at 0, closes after 1
    bucket B               c                     d          opens at 1, closes after 3
    bucket C                          e                     opens at 2, closes after 2

A bucket is open from the first module that has one of its parameters to the first one after which all of them have had
their turn. A tied parameter has it at the first of its modules: what a later one writes is written as in training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One module's. ``opens``: buckets that get memory before it; ``own``: those that it needs; ``open``: all that are
    whole meanwhile; ``closes``: those that have all their values then. ``goes_back``: it may write other parameters
    than these, which have had their turn: tied ones, or with none of its own those of the modules in it."""

    opens: tuple[int, ...]
    own: frozenset[int]
    open: tuple[int, ...]
    closes: tuple[int, ...]
    goes_back: bool


def turns(modules: Sequence[Collection[int]], buckets: Sequence[Collection[int]]) -> list[Turn]:
    """``modules``: their own parameters, by number, in the order in which they are initialised; ``buckets``: which are
    in each. All of those are some module's, and what is in no bucket is left out."""
    bucket_of = {param: index for index, inside in enumerate(buckets) for param in inside}
    left = [{*inside} for inside in buckets]
    found: list[Turn] = []
    now_open: dict[int, None] = {}
    for params in modules:
        first = [param for param in params if param in bucket_of and param in left[bucket_of[param]]]
        own = dict.fromkeys(bucket_of[param] for param in first)
        opens = tuple(bucket for bucket in own if bucket not in now_open)
        now_open |= dict.fromkeys(opens)
        for param in first:
            left[bucket_of[param]].discard(param)
        closes = tuple(bucket for bucket in own if not left[bucket])
        goes_back = not first or len(first) < sum(param in bucket_of for param in params)
        found.append(Turn(opens, frozenset(own), tuple(now_open), closes, goes_back))
        for bucket in closes:
            del now_open[bucket]
    assert not any(left), f"no module has {next(filter(None, left))}"
    return found


def most_beside(found: Sequence[Turn], nbytes: Sequence[int]) -> int:
    """The most bytes of buckets that are open beside a module's own ones. ``nbytes``: of each bucket."""
    return max((sum(nbytes[bucket] for bucket in {*turn.open} - turn.own) for turn in found), default=0)


def most_open(found: Sequence[Turn], nbytes: Sequence[int]) -> int:
    """The most bytes of buckets that are whole at a time, a module's own ones among them."""
    return max((sum(nbytes[bucket] for bucket in turn.open) for turn in found), default=0)


def largest(found: Sequence[Turn], nbytes: Sequence[int]) -> tuple[int, int]:
    """The module whose own parameters lie in buckets of the most bytes, and how many these are."""
    own: Iterator[tuple[int, int]] = ((sum(nbytes[each] for each in turn.own), -at) for at, turn in enumerate(found))
    most, at = max(own, default=(0, 0))
    return -at, most
