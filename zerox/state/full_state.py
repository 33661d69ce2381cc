"""The whole state on one rank or on all, in the form of torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket
from zerox.memory.flat import dense_strides
from zerox.memory.forms import decoded, master_of
from zerox.memory.stored import Stored
from zerox.plan.layout import Segment
from zerox.ranks.group import CPU, Ranks
from zerox.rules.rule import MASTER, REMAINDER
from zerox.state.sliced_state import STEP


def full_state(
    buckets: Sequence[Bucket], ranks: Ranks, to: int | None = 0, device: torch.device = CPU
) -> dict[int, dict[str, Tensor]]:
    """By parameters' numbers, on ``device`` of rank ``to`` (None: of all ranks); elsewhere nothing.

    Steps are on the CPU, as in torch. Collective; one bucket of one kind of state is gathered at a time.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for bucket in buckets:
        segments = [bucket.plan.layout.segments(rank) for rank in range(ranks.size)]
        steps = torch.zeros(max(map(len, segments)), dtype=torch.int64, device=bucket.steps.device)
        steps[: bucket.steps.numel()] = bucket.steps
        for rank, counted in enumerate(ranks.gather(steps, to)):
            for segment, step in zip(segments[rank], counted.tolist(), strict=False):
                # float32 as in torch, whose foreach and fused paths take no other dtype.
                found.setdefault(bucket.members[segment.slot].number, {})[STEP] = torch.tensor(
                    float(step), dtype=torch.float32, device=CPU
                )
        for stored in in_full(bucket):
            shards = ranks.gather(stored.values, to)
            for slot, whole in _assembled(bucket, segments, shards, device) if shards else ():
                found[bucket.members[slot].number][stored.spec.key] = whole
    return dict(sorted(found.items()))


def in_full(bucket: Bucket) -> Iterator[Stored]:
    """The state of the own shard's elements in float32 or float64, in whatever form it is stored."""
    for stored in bucket.state.values():
        if stored.spec == REMAINDER:
            yield Stored(MASTER, master_of(bucket.param_shard, stored.values))
        else:
            wide = decoded(stored)
            yield Stored(stored.spec, wide.float() if wide.dtype is not torch.float64 else wide)


def _assembled(
    bucket: Bucket, segments: Sequence[Sequence[Segment]], shards: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Whole tensors by slot, in the parameters' shapes, from each rank's shard."""
    wholes = {}
    for slot, member in enumerate(bucket.members):
        strides = dense_strides(member.param)
        wholes[slot] = torch.empty_strided(member.param.shape, strides, dtype=shards[0].dtype, device=device)
    for own, shard in zip(segments, shards, strict=True):
        for segment in own:
            flat = wholes[segment.slot].as_strided((wholes[segment.slot].numel(),), (1,))
            part = shard[segment.span.start : segment.span.stop]
            flat[segment.param_start : segment.param_start + part.numel()] = part
    yield from wholes.items()
