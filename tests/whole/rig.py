"""Trainings whose parameters lie whole on one rank, as a rule may ask for: none of zerox's own does yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from zerox import FusedShardedAdam
from zerox.rules.rule import Rule


def cost(rule: Rule, shape: Sequence[int], group: Mapping[str, Any]) -> int | None:
    """Drawn from the shape: with a parameter's size as its cost ranks would have about as much each."""
    return hashlib.sha256(str(tuple(shape)).encode()).digest()[0] if rule.name != "sgd" else None


@contextmanager
def whole(is_on: bool = True) -> Iterator[None]:
    """Inside, optimizers that are made have parameters that lie whole on one rank, but for those of SGD."""
    with patch.object(Rule, "cost", cost if is_on else Rule.cost):
        yield


def unequal_buckets(optimizer: FusedShardedAdam) -> int:
    """How many buckets have shards of several lengths."""
    layouts = [bucket.plan.layout for bucket in optimizer.inside.buckets]
    return sum(len({stop - start for start, stop in pairwise(layout.shard_starts)}) > 1 for layout in layouts)
