"""The parameters whose gradients a call is about: all of them, or some."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket, GradPart
from zerox.model_names import name_or_shape


class Asked:
    """``slots``: by bucket, those that are meant; None: all of all buckets."""

    def __init__(self, buckets: Sequence[Bucket], slots: Mapping[int, frozenset[int]] | None = None) -> None:
        self.buckets = buckets
        self.slots = slots

    @property
    def has_all(self) -> bool:
        return self.slots is None

    @property
    def number(self) -> int:
        """The same on all ranks that mean the same parameters, else another one; 0 for all."""
        if self.slots is None:
            return 0
        text = repr(sorted((bucket, sorted(slots)) for bucket, slots in self.slots.items()))
        return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    @property
    def numbers(self) -> list[int]:
        """The members'."""
        assert self.slots is not None
        return [self.buckets[bucket].members[slot].number for bucket, slots in self.slots.items() for slot in slots]

    def slots_of(self, bucket: int) -> list[int]:
        if self.slots is None:
            return list(range(len(self.buckets[bucket].members)))
        return sorted(self.slots.get(bucket, ()))

    def segments(self, bucket: int, part: GradPart) -> Tensor:
        """Those of a part of this rank's shard, without a copy from the host."""
        if self.slots is None:
            return part.segments
        meant = self.slots.get(bucket, frozenset())
        own = self.buckets[bucket].own_segments[part.first_row : part.first_row + part.segments.shape[0]]
        runs = [
            [row for row, _ in rows]
            for is_meant, rows in groupby(enumerate(own), key=lambda each: each[1].slot in meant)
            if is_meant
        ]
        found = [part.segments[rows[0] : rows[-1] + 1] for rows in runs]
        return torch.cat(found) if len(found) > 1 else found[0] if found else part.segments[:0]


def find_asked(buckets: Sequence[Bucket], params: Tensor | Iterable[Tensor] | None, own: Collection[int] = ()) -> Asked:
    """Raises ValueError for a tensor that is in no bucket, as are the rank's ``own``, by id."""
    if params is None:
        return Asked(buckets)
    places = {
        id(member.param): (bucket, slot)
        for bucket, each in enumerate(buckets)
        for slot, member in enumerate(each.members)
    }
    slots: dict[int, set[int]] = {}
    for param in [params] if isinstance(params, Tensor) else params:
        if id(param) in own:
            raise ValueError(
                f"parameters: {name_or_shape(param)} is this rank's own, which no DistributedDataParallel has: pass "
                "none of these, or leave parameters= out for one norm of all"
            )
        if id(param) not in places:
            raise ValueError(
                f"parameters: a tensor of shape {tuple(param.shape)} is none that this optimizer trains; pass "
                "parameters of its param groups that require gradients (tables, with sparse=True, are not known here)"
            )
        bucket, slot = places[id(param)]
        slots.setdefault(bucket, set()).add(slot)
    return Asked(buckets, {bucket: frozenset(found) for bucket, found in slots.items()})


def find_by_number(buckets: Sequence[Bucket], numbers: Iterable[int]) -> Asked:
    by_number = {member.number: member.param for bucket in buckets for member in bucket.members}
    return find_asked(buckets, [by_number[number] for number in numbers])
