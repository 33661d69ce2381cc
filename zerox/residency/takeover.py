"""Which shards a new optimizer takes over from a deleted one: Note [Shards are handed over] in csrc/residency."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from zerox import _C as C
from zerox.memory.flat import dense_strides
from zerox.memory.left_bucket import LeftBucket
from zerox.plan.layout import Layout
from zerox.plan.span import Span
from zerox.ranks.group import Ranks


def find_left(params: Sequence[Tensor], layout: Layout, own: Span, residents: C.Residency) -> LeftBucket | None:
    """The bucket that has these parameters where a new one of ``residents`` would have them, if it can be taken over.

    Nothing is read of it.
    """
    source = C.Residency.left_with(params[0])
    if source is None or source.kind != residents.kind:
        return None
    left = LeftBucket(source, source.bucket_of(params[0]))
    if not source.is_free(left.bucket):
        return None
    dtype, room, shard = params[0].dtype, left.room, left.shard
    fits = room.nbytes == layout.numel * dtype.itemsize and shard.dtype == dtype and shard.numel() == own.numel
    places = [room.address + offset * dtype.itemsize for offset in layout.offsets]
    is_there = [C.address_of(param) for param in params] == places
    return left if fits and is_there and all(param.stride() == dense_strides(param) for param in params) else None


def agree(ranks: Ranks, found: Sequence[LeftBucket | None]) -> list[LeftBucket | None]:
    """Those of a plan's buckets that all ranks have found. Collective."""
    texts = ["" if each is None else each.text for each in found]
    everyone = [json.loads(text) for text in ranks.all_gather_text(json.dumps(texts))]
    return [each if len({texts[i] for texts in everyone}) == 1 else None for i, each in enumerate(found)]


@contextmanager
def handing_over(ranks: Ranks, taken: Iterable[LeftBucket]) -> Iterator[None]:
    """Inside, no rank reads these buckets' shards. Collective, if there are any. RuntimeError if one is in use."""
    by_source: dict[C.Residency, list[int]] = {}
    for source, bucket in taken:
        by_source.setdefault(source, []).append(bucket)
    with ExitStack() as stack:
        if by_source:
            is_in_use = False
            for source, buckets in by_source.items():
                stack.callback(source.end_handover)
                is_in_use |= not source.begin_handover(buckets)
            told = ranks.all_gather_text("in use" if is_in_use else "")
            if in_use := [rank for rank, text in enumerate(told) if text]:
                raise RuntimeError(
                    f"zerox: a thread of rank {in_use[0]} reads parameters while a new optimizer takes their shards "
                    "over from a deleted one: build it while nothing reads them"
                )
        yield
