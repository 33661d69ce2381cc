"""A bucket's state as segments of whole tensors, for all parameters: those of other ranks' parameters are empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from zerox.memory.bucket import Bucket, Member
from zerox.memory.forms import decode
from zerox.memory.stored import SCALE, Stored
from zerox.plan.cut import Cut
from zerox.plan.form import BLOCK_NUMEL, num_blocks
from zerox.plan.span import Span
from zerox.rules import rule
from zerox.sliced_tensor import SlicedTensor

STEP = rule.STEP.key
OF_ONE_RANK = (
    "A file with one rank's share can't be made whole any more: each rank loads its own, at the number of ranks that "
    "saved them. Before the next save call optimizer.consolidate_state_dict() on all ranks, or save by zerox.save() or "
    "full_state_dict(), which any number of ranks loads"
)


def blocks_of(span: Span) -> Span:
    return Span(span.start // BLOCK_NUMEL, num_blocks(span.stop))


def sliced_state(
    bucket: Bucket, kept: Iterable[Stored] | None = None
) -> Iterator[tuple[Member, dict[str, SlicedTensor]]]:
    """Each parameter of the bucket with views of its state, by the keys of ``optimizer.state``.

    The state of elements, remainder and master too, has the parameter's shape, or the one that its spec makes of it,
    and the dtype that it is stored in; scales have one element for each 256 of the parameter in memory order; numbers
    (step is int64) have no dimensions. ``kept``: the own shard's state, if it is to be shown in another form.

    Of a DTensor they are parts of the whole parameter's. Where its blocks are not blocks of that one, scales fit
    nowhere in it: see :func:`whole_form`.
    """
    shown = list(bucket.shown_state() if kept is None else kept)
    rows = {segment.slot: row for row, segment in enumerate(bucket.own_segments)}
    for slot, member in enumerate(bucket.members):
        row = rows.get(slot, -1)
        state = {}
        for key, numbers in bucket.numbers.items():
            number = numbers[row : row + 1] if slot in rows else numbers[:0]
            state[key] = SlicedTensor((), (), Span(0, number.numel()), number)
        for stored in shown:
            key, lies = stored.spec.key, bucket.layout_of(stored)
            if (row, key) in bucket.absent or not is_shown(bucket, stored, slot):
                continue
            part, span = bucket.part_of(stored, row), lies.segment(row).of_param
            state[key] = SlicedTensor(lies.shapes[slot] or (), lies.strides[slot], span, part.values, member.cut)
            if part.scales is not None:
                state[key + SCALE] = scales_like(member, span, part.scales)
        yield member, state


def is_shown(bucket: Bucket, stored: Stored, slot: int) -> bool:
    """A mask, and what a class keeps for some numbers of dimensions only, are of some of a bucket's parameters."""
    if stored.layout is not None:
        return stored.layout.shapes[slot] is not None
    return stored.spec != rule.MASK or (bucket.mask is not None and slot in bucket.mask.slots)


def whole_form(bucket: Bucket) -> Iterator[tuple[Member, dict[str, SlicedTensor]]]:
    """The same in a form in which it is a part of the whole parameter's state: decoded where blocks don't fit."""
    for member, state in sliced_state(bucket):
        coded = {key: stored for key, stored in bucket.state.items() if stored.form.scaled and key in state}
        for key, stored in coded.items() if not member.keeps_blocks else ():
            own = replace(stored, values=state[key].own, scales=state.pop(key + SCALE).own)
            state[key] = state[key].fill_with(decode(own))
        yield member, state


def scales_like(member: Member, span: Span, scales: Tensor) -> SlicedTensor:
    """Those of the blocks that these elements of a parameter are in."""
    cut, shape = member.cut, member.param.shape
    if cut is not None:  # by rows, or it fits nowhere
        cut = Cut((num_blocks(shape.numel()),), (cut.offsets[0] * shape[1:].numel() // BLOCK_NUMEL,))
    return SlicedTensor((num_blocks(member.local.numel()),), (1,), blocks_of(span), scales, cut)
