"""How much memory gradients and their buffers take at the worst moment of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

AHEAD_IF_PACED = 1  # buckets: see Note [Backward at the pace of the exchange] in csrc/grads/backward.h
UNPACKED_ON_STREAMS = 2  # buckets: see Note [Streams] in csrc/workers/streams.h


@dataclass(frozen=True)
class Flow:
    """Bytes of one bucket's gradients on one rank, from form to form.

    ``local`` gradients are packed into ``flat`` and sent, but for ``zero_copy`` bytes of them, which are sent as they
    are and stay until the bucket has been reduced. Slices that arrive are ``received``, and their mean is the
    ``shard``; on a mesh ``reducing`` bytes of sums are between, for one bucket at a time. If gradients stay whole
    (stage 1), ``whole`` means are gathered from it, and ``kept`` bytes of it stay. The thread that runs backward may be
    stopped before it lets go of a gradient that is packed already: the largest has ``last`` bytes.
    """

    local: int
    flat: int
    received: int
    shard: int
    zero_copy: int = 0
    whole: int = 0
    kept: int = 0
    last: int = 0
    reducing: int = 0

    @property
    def buffers(self) -> int:
        return self.flat + self.zero_copy + self.received

    @property
    def packed(self) -> int:
        """The larger of two moments: while it is packed, and while it is on the wire."""
        return self.flat + max(self.local, self.zero_copy + self.received)


def peak_of_sharded(flows: Sequence[Flow], ahead: int | None) -> int:
    """Stages 2 and 3: local gradients are freed when their bucket is packed, but for the last one if backward is late.

    ``flows`` in launch order. ``ahead``: of how many buckets gradients may be made while one before them is on its way;
    None: of all. With 0 each is reduced before the next one's gradients are made; else it may be reduced while the next
    is packed.
    """
    ahead = len(flows) if ahead is None else ahead
    made = [0, *accumulate(flow.local for flow in flows)]
    most = reduced = 0
    for index, flow in enumerate(flows):
        last = min(index + 1 + ahead, len(flows))
        later = made[last] - made[index + 1]
        most = max(most, reduced + flow.flat + flow.local + later)
        if last > index + 1:
            later = flows[index + 1].packed + made[last] - made[index + 2]
            later = max(later, flows[index + 1].buffers + flows[index + 1].last)
        if ahead > 0:
            later = max(later, flow.last)
        most = max(most, reduced + flow.buffers + flow.reducing + flow.shard + later)
        reduced += flow.shard
    return most


def peak_on_streams(flows: Sequence[Flow]) -> int:
    """Stages 2 and 3 over a backend with streams of its own: memory is free in the order in which the host launches.

    When a bucket is launched, gradients of all but the latest ``UNPACKED_ON_STREAMS`` before it are freed, and buffers
    of all but the last one before it.
    """
    most = reduced = 0
    for index, flow in enumerate(flows):
        first = max(0, index - UNPACKED_ON_STREAMS)
        local = sum(each.local for each in flows[first : index + 1])
        made = reduced + local + sum(each.local for each in flows[max(0, first - 1) : first])
        most = max(most, made + sum(each.buffers + each.reducing for each in flows[max(0, index - 2) : index]))
        reduced += flow.shard
        in_use = sum(each.buffers + each.reducing for each in flows[max(0, index - 1) : index + 1])
        most = max(most, reduced + local + in_use)
    return most


def peak_of_whole(flows: Sequence[Flow], stalled: bool) -> int:
    """Stage 1: the same, but local gradients stay until all means are there."""
    local = sum(flow.local for flow in flows)
    buffers = [flow.flat + flow.received for flow in flows]
    if stalled:
        buffers = [first + second for first, second in zip(buffers, [*buffers, 0][1:], strict=True)]
    most = reduced = 0
    for flow, in_use in zip(flows, buffers, strict=True):
        reduced += flow.shard
        most = max(most, local + reduced + in_use + flow.reducing)
    gathered = 0
    for flow in flows:
        gathered += flow.whole
        most = max(most, local + gathered + reduced)
        reduced -= flow.shard - flow.kept
    return most


def peak_alone(flows: Sequence[Flow], sharded: bool) -> int:
    """One rank: packed and zero-copy gradients are the mean; of whole ones step() packs the small, bucket by bucket."""
    local = sum(flow.local for flow in flows)
    if not sharded:  # a bucket is packed before the one before it is freed
        packed = [flow.flat for flow in flows]
        kept = sum(flow.kept for flow in flows)
        return (
            local + kept + max((first + second for first, second in zip(packed, [0, *packed], strict=False)), default=0)
        )
    most = reduced = 0
    for flow in flows:
        most = max(most, reduced + local + flow.flat)
        reduced += flow.flat + flow.zero_copy
        local -= flow.local
    return most
