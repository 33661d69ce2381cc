"""A bucket of sharded parameters whose optimizer was deleted."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from zerox import _C as C


class LeftBucket(NamedTuple):
    """It belongs to its parameters: see Note [A model outlives its optimizer] in csrc/residency/lease.h.

    ``bucket``: its index in ``source``.
    """

    source: C.Residency
    bucket: int

    @property
    def room(self) -> C.Room:
        return self.source.room(self.bucket)

    @property
    def shard(self) -> Tensor:
        return self.source.shard(self.bucket)

    @property
    def text(self) -> str:
        """The same on all ranks, if it is the same bucket after the same step."""
        return f"{self.source.identity} {self.source.version} {self.bucket}"
