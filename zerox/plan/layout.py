"""Where every element of a bucket lies, and which rank owns it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from zerox.plan.span import SHARD_ALIGN, Span, align_up

SMALL_NUMEL = 4096  # parameters below this are packed densely and lie whole in one shard
FLAG_ALIGN = 64  # elements: slices on the wire start at a multiple of 128 bytes or more


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in one shard.

    ``span`` counts from the shard's start, ``param_start`` from the parameter's.
    """

    slot: int
    span: Span
    param_start: int

    @property
    def of_param(self) -> Span:
        """The same elements, counted from the parameter's start."""
        return Span(self.param_start, self.param_start + self.span.numel)


@dataclass(frozen=True)
class Layout:
    """The flat order of one bucket's parameters, cut into shards, one a rank.

    Without ``owners`` shards are equal. Two ranks, a large parameter A, then small ones b, c, d (``.`` is padding)::

        element  0                       shard_starts[1]           shard_starts[2]
        shard    |--------- rank 0 --------|--------- rank 1 --------|
        holds    |AAAAAAAAAAAAAAAAAAAAAAAAA|AAAAAA...bbbccccc dd.....|
                                                  ^ a multiple of 256 only for large parameters

    Shards are multiples of 256 elements. A parameter of 4,096 elements or more starts at a multiple of 256 and may
    span shards; a smaller one is packed densely, at a multiple of ``start_align``, and never crosses the end of a
    shard. So blocks of 256 elements counted from a parameter's start never cross one either, whatever the bucket sizes
    and the number of ranks: norms and 8-bit state are taken over such blocks.

    ``owners``: a rank for each parameter, which has all of it. A shard is as long as what its rank owns, or 256
    elements if that is nothing. Parameters lie in order inside a shard, but not in the bucket: A, B, C and D of the
    ranks 1, 0, 1 and 0 lie so::

        shard    |-- rank 0 -|------- rank 1 -------|
        holds    |BBBBBBDDDD.|AAAAAAAAAAAAACCCCCCC..|

    ``slices``: of the bucket's one parameter, which has equal slices one behind the other, how many each rank has, one
    or more, in order. A slice has a multiple of 256 elements.
    """

    numels: tuple[int, ...]
    world_size: int
    start_align: int = 1
    owners: tuple[int, ...] | None = None
    slices: tuple[int, ...] | None = None
    shard_starts: Sequence[int] = field(init=False)  # of each rank's shard, and the end of the last
    offsets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.start_align < 1 or SHARD_ALIGN % self.start_align:
            raise ValueError(f"start_align must divide {SHARD_ALIGN}, got {self.start_align}")
        if not self.numels or min(self.numels) < 0:
            raise ValueError(f"a bucket needs parameters of 0 or more elements, got {self.numels}")
        if self.slices is not None:
            offsets, starts = _divide(self.numels, self.slices, self.world_size)
        elif self.owners is None:
            offsets, starts = _cut(self.numels, self.world_size, self.start_align)
        else:
            if len(self.owners) != len(self.numels) or not {*self.owners} <= {*range(self.world_size)}:
                raise ValueError(
                    f"owners must be one of {self.world_size} ranks for each of {len(self.numels)} parameters, got "
                    f"{self.owners}"
                )
            offsets, starts = _deal(self.numels, self.owners, self.world_size, self.start_align)
        object.__setattr__(self, "shard_starts", starts)
        object.__setattr__(self, "offsets", offsets)

    @property
    def has_owners(self) -> bool:
        """Whether parameters, or slices of one, lie whole on one rank, so that shards may be unequal."""
        return self.owners is not None or self.slices is not None

    @property
    def numel(self) -> int:
        """Elements of all shards, padding included."""
        return self.shard_starts[-1]

    @property
    def padding(self) -> int:
        return self.numel - sum(self.numels)

    @cached_property
    def shard_numel(self) -> int:
        """Of the longest shard: of each, unless parameters have owners."""
        if not self.has_owners:
            return self.shard_starts[1]
        return max(self.shard_span(rank).numel for rank in range(self.world_size))

    @cached_property
    def cut_slots(self) -> tuple[int, ...]:
        """Those that several shards have parts of."""
        return tuple(slot for slot in range(len(self.numels)) if len(self.shards_of(slot)) > 1)

    def span(self, slot: int) -> Span:
        return Span(self.offsets[slot], self.offsets[slot] + self.numels[slot])

    def numels_in_front(self, count: int) -> list[int]:
        """How much of each shard the first ``count`` parameters take: all up to where the last of them ends."""
        shards = [self.shard_span(rank) for rank in range(self.world_size)]
        if self.owners is None:
            end = self.span(count - 1).stop if count else 0
            return [min(max(end - shard.start, 0), shard.numel) for shard in shards]
        ends = {self.owners[slot]: self.span(slot).stop for slot in range(count)}
        return [ends.get(rank, shard.start) - shard.start for rank, shard in enumerate(shards)]

    def shard_span(self, rank: int) -> Span:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank}")
        return Span(self.shard_starts[rank], self.shard_starts[rank + 1])

    def shards_of(self, slot: int) -> range:
        """The ranks whose shards have parts of a parameter: at least one, also if it has no elements."""
        if self.owners is not None:
            return range(self.owners[slot], self.owners[slot] + 1)
        if self.slices is not None:
            return range(self.world_size)
        last = self.offsets[slot] + max(self.numels[slot], 1) - 1
        return range(self.offsets[slot] // self.shard_numel, last // self.shard_numel + 1)

    def segments(self, rank: int) -> list[Segment]:
        """The segments that ``rank`` owns, by position."""
        return self.segments_in(self.shard_span(rank))

    def segments_in(self, shards: Span) -> list[Segment]:
        """The same of shards that lie together, counted from the first one's start; by slot, if these are several."""
        found = []
        for slot in range(len(self.numels)):
            span = self.span(slot)
            if part := span.overlap(shards):
                local = Span(part.start - shards.start, part.stop - shards.start)
                found.append(Segment(slot, local, part.start - span.start))
        return found

    @property
    def max_segments(self) -> int:
        """The most segments in any shard. Each has two flags behind the shard on the wire."""
        if self.owners is not None:
            return max(Counter(self.owners).values())
        shards = [self.shards_of(slot) for slot in range(len(self.numels))]  # they never fall, as slots lie in order
        most, oldest = 0, 0
        for slot, ranks in enumerate(shards):
            while shards[oldest][-1] < ranks[0]:
                oldest += 1
            most = max(most, slot - oldest + 1)
        return most

    @property
    def trailer_numel(self) -> int:
        """Elements for flags behind each shard on the wire."""
        return align_up(2 * self.max_segments, FLAG_ALIGN)

    def draw(self, names: Sequence[str] | None = None) -> str:
        """The layout as text, a line a shard."""
        least = min(self.shard_span(rank).numel for rank in range(self.world_size))
        numel = f"{least:,} to {self.shard_numel:,}" if least < self.shard_numel else f"{least:,}"
        lines = [f"{self.world_size} shards of {numel} elements, {self.padding:,} of padding"]
        for rank in range(self.world_size):
            parts = []
            for segment in self.segments(rank):
                name = names[segment.slot] if names else f"#{segment.slot}"
                whole = segment.span.numel == self.numels[segment.slot]
                cut = "" if whole else f"[{segment.param_start}:{segment.param_start + segment.span.numel}]"
                parts.append(f"{segment.span.start}..{segment.span.stop} {name}{cut}")
            lines.append(f"rank {rank}: " + (", ".join(parts) or "padding only"))
        return "\n".join(lines)


Places = tuple[tuple[int, ...], Sequence[int]]  # offsets, and where shards start


def _cut(numels: Sequence[int], world_size: int, start_align: int) -> Places:
    """Into equal shards."""
    shard_numel = align_up(max(1, -(-sum(numels) // world_size)), SHARD_ALIGN)
    largest_small = max((n for n in numels if n < SMALL_NUMEL), default=0)
    shard_numel = max(shard_numel, align_up(largest_small, SHARD_ALIGN))
    while True:
        offsets, end = _place(numels, start_align, shard_numel)
        excess = end - shard_numel * world_size
        if excess <= 0:
            return offsets, range(0, shard_numel * world_size + 1, shard_numel)
        shard_numel += align_up(-(-excess // world_size), SHARD_ALIGN)


def _divide(numels: Sequence[int], slices: Sequence[int], world_size: int) -> Places:
    """One parameter, by slices."""
    numel, rest = divmod(sum(numels), sum(slices) or 1)
    if len(numels) != 1 or len(slices) != world_size or min(slices) < 1 or rest or numel % SHARD_ALIGN:
        raise ValueError(
            f"slices must be of one parameter, of a multiple of {SHARD_ALIGN} elements, and one or more for each of "
            f"{world_size} ranks, got {tuple(slices)} of {tuple(numels)} elements"
        )
    return (0,), tuple(numel * count for count in accumulate(slices, initial=0))


def _deal(numels: Sequence[int], owners: Sequence[int], world_size: int, start_align: int) -> Places:
    """Whole, to their owners."""
    slots_of: list[list[int]] = [[] for _ in range(world_size)]
    for slot, owner in enumerate(owners):
        slots_of[owner].append(slot)
    offsets, starts = [0] * len(numels), [0]
    for slots in slots_of:
        # Each shard has elements: a message of none is no case of its own, as it would be for each exchange.
        placed, end = _place([numels[slot] for slot in slots], start_align) if slots else ((), 1)
        for slot, offset in zip(slots, placed, strict=True):
            offsets[slot] = starts[-1] + offset
        starts.append(starts[-1] + align_up(max(end, 1), SHARD_ALIGN))
    return tuple(offsets), tuple(starts)


def _place(numels: Sequence[int], start_align: int, shard_numel: int | None = None) -> tuple[tuple[int, ...], int]:
    """Offsets for shards of this length, or for a single one, and where the last parameter ends."""
    offsets = []
    end = 0
    for numel in numels:
        end = align_up(end, SHARD_ALIGN if numel >= SMALL_NUMEL else start_align)
        if shard_numel and 0 < numel < SMALL_NUMEL and end // shard_numel != (end + numel - 1) // shard_numel:
            end = align_up(end, shard_numel)
        offsets.append(end)
        end += numel
    # An empty parameter at the very end still needs a shard to lie in.
    return tuple(offsets), end + (1 if numels[-1] == 0 else 0)
