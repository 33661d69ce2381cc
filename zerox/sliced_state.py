"""A bucket's state as slices of whole tensors, for all its parameters: those of other ranks have no element here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from zerox.bucket import Bucket, Member
from zerox.buffers import dense_strides
from zerox.moments import BLOCK_NUMEL
from zerox.plan.layout import Segment
from zerox.plan.span import Span
from zerox.sliced_tensor import SlicedTensor

STEP = "step"


def num_blocks(numel: int) -> int:
    """Scales of so many elements in 8 bits. Blocks are counted from the parameter's start, and no shard cuts one."""
    return math.ceil(numel / BLOCK_NUMEL)


def blocks_of(span: Span) -> Span:
    return Span(span.start // BLOCK_NUMEL, num_blocks(span.stop))


def sliced_state(
    bucket: Bucket, shards: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[Member, dict[str, SlicedTensor]]]:
    """Each parameter of the bucket with views of its state, by the keys of ``optimizer.state``.

    exp_avg, exp_avg_sq, max_exp_avg_sq, remainder and master have the parameter's shape, and the dtype that they are
    stored in; exp_avg_scale and so on, float32, have one element for each 256 of the parameter in memory order; step
    is int64 without dimensions. ``shards``: what is kept for each element of the own shard, in another form than it is
    stored in, without scales.
    """
    kept = bucket.state_shards() if shards is None else shards
    rows = {segment.slot: (row, segment) for row, segment in enumerate(bucket.own_segments)}
    elsewhere = -1, Segment(-1, Span(0, 0), 0)
    for slot, member in enumerate(bucket.members):
        row, segment = rows.get(slot, elsewhere)
        steps = bucket.steps[row : row + 1] if slot in rows else bucket.steps[:0]
        state = {STEP: SlicedTensor((), (), Span(0, steps.numel()), steps)}
        shape, strides = member.param.shape, dense_strides(member.param)
        span = Span(segment.param_start, segment.param_start + segment.span.numel)
        own = slice(segment.span.start, segment.span.stop)
        for what, shard in kept.items():
            state[what] = SlicedTensor(shape, strides, span, shard[own])
        scale_shape = (num_blocks(member.param.numel()),)
        for what, scales in bucket.moments.scales_of(own).items() if shards is None else ():
            state[what] = SlicedTensor(scale_shape, (1,), blocks_of(span), scales)
        yield member, state
