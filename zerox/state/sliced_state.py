"""A bucket's state as segments of whole tensors, for all parameters: those of other ranks' parameters are empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zerox.memory.bucket import Bucket, Member
from zerox.memory.flat import dense_strides
from zerox.memory.stored import SCALE, Stored
from zerox.plan.form import BLOCK_NUMEL, num_blocks
from zerox.plan.layout import Segment
from zerox.plan.span import Span
from zerox.rules import rule
from zerox.sliced_tensor import SlicedTensor

STEP = rule.STEP.key


def blocks_of(span: Span) -> Span:
    return Span(span.start // BLOCK_NUMEL, num_blocks(span.stop))


def sliced_state(
    bucket: Bucket, kept: Iterable[Stored] | None = None
) -> Iterator[tuple[Member, dict[str, SlicedTensor]]]:
    """Each parameter of the bucket with views of its state, by the keys of ``optimizer.state``.

    The state of elements, remainder and master too, has the parameter's shape, and the dtype that it is stored in;
    scales have one element for each 256 of the parameter in memory order; numbers (step is int64) have no dimensions.
    ``kept``: the own shard's state, if it is to be shown in another form.
    """
    shown = list(bucket.state.values() if kept is None else kept)
    rows = {segment.slot: (row, segment) for row, segment in enumerate(bucket.own_segments)}
    elsewhere = -1, Segment(-1, Span(0, 0), 0)
    for slot, member in enumerate(bucket.members):
        row, segment = rows.get(slot, elsewhere)
        state = {}
        for key, numbers in bucket.numbers.items():
            number = numbers[row : row + 1] if slot in rows else numbers[:0]
            state[key] = SlicedTensor((), (), Span(0, number.numel()), number)
        shape, strides = member.param.shape, dense_strides(member.param)
        span = Span(segment.param_start, segment.param_start + segment.span.numel)
        own = slice(segment.span.start, segment.span.stop)
        for stored in shown:
            part, key = stored.part(own), stored.spec.key
            if (row, key) in bucket.absent:
                continue
            state[key] = SlicedTensor(shape, strides, span, part.values)
            if part.scales is not None:
                scale_shape = (num_blocks(member.param.numel()),)
                state[key + SCALE] = SlicedTensor(scale_shape, (1,), blocks_of(span), part.scales)
        yield member, state
