"""What this rank's shards have of the parameters that a Sparsity is of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket, Member
from zerox.memory.forms import master_of
from zerox.rules.rule import REMAINDER


@dataclass(frozen=True)
class Own:
    """``elements`` of a bucket's shard: this rank's part of a parameter, from its element ``param_start`` on."""

    index: int  # of the bucket
    bucket: Bucket
    slot: int
    elements: slice
    param_start: int

    @property
    def member(self) -> Member:
        return self.bucket.members[self.slot]

    @property
    def numel(self) -> int:
        return self.elements.stop - self.elements.start

    def values(self) -> Tensor:
        """float32: what the update starts from, masters where they still round to their parameter."""
        param = self.bucket.param_shard[self.elements]
        if self.bucket.master is None:
            return param.float()
        master = self.bucket.master.values[self.elements]
        if self.bucket.master.spec == REMAINDER:
            return master_of(param, master)
        return torch.where(master.to(param.dtype) == param, master, param.float())

    def kept(self) -> Tensor:
        """bool, by the mask that there is."""
        if self.bucket.mask is None:
            return torch.ones(self.numel, dtype=torch.bool, device=self.bucket.device)
        return self.bucket.mask.kept(self.elements.start, self.elements.stop)

    def chances(self, step: int) -> Tensor:
        """int32: random numbers of 31 bits that hang on the parameter's name, the element and the step alone."""
        digest = hashlib.sha256(f"{self.member.name} {step}".encode()).digest()
        mixed = torch.arange(self.param_start, self.param_start + self.numel, device="cpu").to(self.bucket.device)
        for shift in (0, 4, 8):
            word = int.from_bytes(digest[shift : shift + 4], "little")
            mixed = (mixed ^ (mixed >> 32) ^ word) * 0x9E3779B1 & 0xFFFFFFFF
            mixed = mixed ^ (mixed >> 15)
        return (mixed >> 1).to(torch.int32)


def owned(buckets: Sequence[Bucket], members: Sequence[Member]) -> list[Own]:
    """One for each of ``members``, in their order, with no elements where other ranks have them."""
    found = {}
    for index, bucket in enumerate(buckets):
        rows = {segment.slot: segment for segment in bucket.own_segments}
        for slot, member in enumerate(bucket.members):
            if (segment := rows.get(slot)) is None:
                found[member.number] = Own(index, bucket, slot, slice(0, 0), 0)
            else:
                elements = slice(segment.span.start, segment.span.stop)
                found[member.number] = Own(index, bucket, slot, elements, segment.param_start)
    return [found[member.number] for member in members]
