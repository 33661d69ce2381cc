"""The parts of an optimizer that tests, tools and zerox.checkpoint may look at, beside its public methods."""

from __future__ import annotations

from typing import NamedTuple

from zerox._C import BucketManager
from zerox.flow.grads import Grads
from zerox.flow.params import ParamGather
from zerox.flow.residency import Residency
from zerox.memory.bucket import Bucket, Member
from zerox.ranks.group import Ranks
from zerox.rules.of_groups import Rules


class Inside(NamedTuple):
    """``frozen``: parameters that have no bucket. ``buckets``: the optimizer's own list, which grows."""

    rules: Rules
    buckets: list[Bucket]
    frozen: list[Member]
    ranks: Ranks
    grads: Grads
    gather: ParamGather | Residency

    @property
    def manager(self) -> BucketManager:
        return self.grads.manager

    @property
    def members(self) -> list[Member]:
        """All parameters, frozen ones too."""
        return [*(member for bucket in self.buckets for member in bucket.members), *self.frozen]
