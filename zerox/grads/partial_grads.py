"""Gradients that are Partial over a model axis: this rank's shards of them, summed over the axis.

Under sequence parallelism each rank of the tensor axis has the gradient of a norm's weight for its own tokens only.
Ranks along the axis have the same layout of such parameters, and so the same shard: shards are summed instead of whole
gradients, once a step. What has been reduced stays as it is, so that more can be added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Bucket
from zerox.plan.span import Span
from zerox.ranks.model_axes import ModelAxes


@dataclass(frozen=True)
class Summed:
    """``version``: of what it was summed from."""

    shard: Tensor
    version: int


class PartialGrads:
    """``buckets``: by index, those that lie alike on all ranks of some axis, with these axes."""

    def __init__(self, manager: C.BucketManager, model: ModelAxes, lasts: bool) -> None:
        """``lasts``: a shard is as it was reduced; else it is made anew at each call, and so is the sum."""
        self.grads = manager.grads
        self.model = model
        self.lasts = lasts
        self.buckets: dict[int, Bucket] = {}
        self.summed: dict[int, Summed] = {}

    def shard(self, index: int) -> Tensor | None:
        """None: the reduced shard is the sum."""
        found = self.summed.get(index)
        return None if found is None else found.shard

    def refresh(self) -> None:
        """To be called where ranks have synchronized and everything has been reduced. Collective over the axes."""
        for index, bucket in self.buckets.items():
            if not (partial := self.grads.partial(index)):
                continue
            shard, version = self.grads.shard(index), self.grads.version(index)
            if shard is None:
                self.summed.pop(index, None)
            elif not self.lasts or index not in self.summed or self.summed[index].version != version:
                self.summed[index] = Summed(self._sum(bucket, shard, partial), version)

    def _sum(self, bucket: Bucket, shard: Tensor, partial: list[int]) -> Tensor:
        """In order of coordinates, rounded once: the same bits on all ranks. What is not Partial is coordinate 0's."""
        dims = [self.model.dims_of(member.param) for member in bucket.members]
        total = shard
        for axis in range(len(self.model.axes)):
            over = [
                any(mask >> dim & 1 and along == axis for dim, along in of.items())
                for mask, of in zip(partial, dims, strict=True)
            ]
            if not any(over):
                continue
            first, *others = self.model.all_gather(total, axis)
            total = first.to(torch.promote_types(first.dtype, torch.float32))
            for span in _runs(bucket, over):
                for other in others:
                    total[span.start : span.stop] += other[span.start : span.stop]
        return total.to(shard.dtype)


def _runs(bucket: Bucket, chosen: list[bool]) -> Iterator[Span]:
    """The elements of the shard that are of chosen slots."""
    for is_chosen, segments in groupby(bucket.own_segments, key=lambda segment: chosen[segment.slot]):
        if is_chosen:
            spans = [segment.span for segment in segments]
            yield Span(spans[0].start, spans[-1].stop)
