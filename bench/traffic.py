"""What a rank sends in a training step, in closed form from the plan.

The extension counts the same (`Traffic` in csrc/exchange/exchange.h), whether a neighbour is sent a message or
reads it. A native collective is counted as the ring that moves the fewest bytes: as many slices as there are other
ranks. gloo's reduce-scatter moves twice as many, as it is an all-reduce. What ranks tell each other in step() (128
bytes to each of log2 W others) is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerox.plan.buckets import BucketPlan
from zerox.plan.stage import SHARDED, Stage

DIRECT, MESSAGES, NATIVE = EXCHANGES = ("direct", "messages", "native")


@dataclass(frozen=True)
class Sent:
    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Itemsizes:
    """Bytes of an element, of a bucket's parameters and of its gradients on the wire."""

    param: int
    wire: int


def sent_in_step(plans: Sequence[BucketPlan], rank: int, stage: Stage, exchange: str, sizes: Itemsizes) -> Sent:
    """One backward and one step()."""
    total = Sent()
    for plan in plans:
        gather = sent_by_gather(plan, sizes)
        total += sent_by_scatter(plan, rank, exchange, sizes) + gather
        if stage.grads is not SHARDED:  # the mean gradient is gathered as well
            total += gather
    return total


def sent_by_gather(plan: BucketPlan, sizes: Itemsizes) -> Sent:
    """This rank's shard of the parameters to each other rank."""
    others = plan.layout.world_size - 1
    return Sent(others, others * plan.layout.shard_numel * sizes.param)


def sent_by_scatter(plan: BucketPlan, rank: int, exchange: str, sizes: Itemsizes) -> Sent:
    """Each other rank's slice: in one message, or from where its gradients lie and what is packed in one more."""
    layout = plan.layout
    others = layout.world_size - 1
    slice_numel = layout.shard_numel + layout.trailer_numel
    straight = 0 if exchange == NATIVE or sizes.param != sizes.wire else plan.num_straight
    if not straight or not others:
        return Sent(others, others * slice_numel * sizes.wire)
    # To all ranks, and of that what would go to this one. Between straight slots there is padding, which stays.
    spans = [layout.span(slot) for slot in range(straight)]
    owners = [(span.start // layout.shard_numel, (span.stop - 1) // layout.shard_numel) for span in spans]
    messages = layout.world_size + sum(last - first + 1 for first, last in owners)
    numel = layout.world_size * slice_numel - layout.end_of(straight) + sum(span.numel for span in spans)
    own = layout.shard_span(rank)
    kept = [part for span in spans if (part := span.overlap(own))]
    own_straight = min(max(layout.end_of(straight) - own.start, 0), layout.shard_numel)
    messages -= 1 + len(kept)
    numel -= slice_numel - own_straight + sum(part.numel for part in kept)
    return Sent(messages, numel * sizes.wire)
