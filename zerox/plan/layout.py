"""Where every element of a bucket lies, and which rank owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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


@dataclass(frozen=True)
class Layout:
    """The flat order of one bucket's parameters, cut into equal shards, one a rank.

    Two ranks, a large parameter A, then small ones b, c, d (``.`` is padding)::

        element  0                       shard_numel               2 * shard_numel
        shard    |--------- rank 0 --------|--------- rank 1 --------|
        holds    |AAAAAAAAAAAAAAAAAAAAAAAAA|AAAAAA...bbbccccc dd.....|
                                                  ^ a multiple of 256 only for large parameters

    Shards are multiples of 256 elements. A parameter of 4,096 elements or more starts at a multiple of 256 and may
    span shards; a smaller one is packed densely, at a multiple of ``start_align``, and never crosses the end of a
    shard. So blocks of 256 elements counted from a parameter's start never cross one either, whatever the bucket sizes
    and the number of ranks: norms and 8-bit state are taken over such blocks.
    """

    numels: tuple[int, ...]
    world_size: int
    start_align: int = 1
    shard_numel: int = field(init=False)
    offsets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.start_align < 1 or SHARD_ALIGN % self.start_align:
            raise ValueError(f"start_align must divide {SHARD_ALIGN}, got {self.start_align}")
        if not self.numels or min(self.numels) < 0:
            raise ValueError(f"a bucket needs parameters of 0 or more elements, got {self.numels}")
        shard_numel = align_up(max(1, -(-sum(self.numels) // self.world_size)), SHARD_ALIGN)
        largest_small = max((n for n in self.numels if n < SMALL_NUMEL), default=0)
        shard_numel = max(shard_numel, align_up(largest_small, SHARD_ALIGN))
        while True:
            offsets, end = _place(self.numels, shard_numel, self.start_align)
            excess = end - shard_numel * self.world_size
            if excess <= 0:
                break
            shard_numel += align_up(-(-excess // self.world_size), SHARD_ALIGN)
        object.__setattr__(self, "shard_numel", shard_numel)
        object.__setattr__(self, "offsets", offsets)

    @property
    def numel(self) -> int:
        """Elements of all shards, padding included."""
        return self.shard_numel * self.world_size

    @property
    def padding(self) -> int:
        return self.numel - sum(self.numels)

    @cached_property
    def cut_slots(self) -> tuple[int, ...]:
        """Those that several shards have parts of."""
        spans = [self.span(slot) for slot in range(len(self.numels))]
        ends = [(span.start // self.shard_numel, (span.stop - 1) // self.shard_numel) for span in spans]
        return tuple(slot for slot, (first, last) in enumerate(ends) if first < last)

    def span(self, slot: int) -> Span:
        return Span(self.offsets[slot], self.offsets[slot] + self.numels[slot])

    def end_of(self, count: int) -> int:
        """Where the first ``count`` parameters end."""
        return self.span(count - 1).stop if count else 0

    def shard_span(self, rank: int) -> Span:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank}")
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def segments(self, rank: int) -> list[Segment]:
        """The segments that ``rank`` owns, by position."""
        return self.segments_in(self.shard_span(rank))

    def segments_in(self, shards: Span) -> list[Segment]:
        """The same of shards that lie together, counted from the first one's start."""
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
        first, last = [], []  # the shards of each slot; neither list ever falls, as slots lie in order
        for slot, numel in enumerate(self.numels):
            first.append(self.offsets[slot] // self.shard_numel)
            last.append((self.offsets[slot] + max(numel, 1) - 1) // self.shard_numel)
        most, oldest = 0, 0
        for slot, shard in enumerate(first):
            while last[oldest] < shard:
                oldest += 1
            most = max(most, slot - oldest + 1)
        return most

    @property
    def trailer_numel(self) -> int:
        """Elements for flags behind each shard on the wire."""
        return align_up(2 * self.max_segments, FLAG_ALIGN)

    def draw(self, names: Sequence[str] | None = None) -> str:
        """The layout as text, a line a shard."""
        lines = [f"{self.world_size} shards of {self.shard_numel:,} elements, {self.padding:,} of padding"]
        for rank in range(self.world_size):
            parts = []
            for segment in self.segments(rank):
                name = names[segment.slot] if names else f"#{segment.slot}"
                whole = segment.span.numel == self.numels[segment.slot]
                cut = "" if whole else f"[{segment.param_start}:{segment.param_start + segment.span.numel}]"
                parts.append(f"{segment.span.start}..{segment.span.stop} {name}{cut}")
            lines.append(f"rank {rank}: " + (", ".join(parts) or "padding only"))
        return "\n".join(lines)


def _place(numels: Sequence[int], shard_numel: int, start_align: int) -> tuple[tuple[int, ...], int]:
    """Offsets for shards of this length, and where the last parameter ends."""
    offsets = []
    end = 0
    for numel in numels:
        end = align_up(end, SHARD_ALIGN if numel >= SMALL_NUMEL else start_align)
        if 0 < numel < SMALL_NUMEL and end // shard_numel != (end + numel - 1) // shard_numel:
            end = align_up(end, shard_numel)
        offsets.append(end)
        end += numel
    # An empty parameter at the very end still needs a shard to lie in.
    return tuple(offsets), end + (1 if numels[-1] == 0 else 0)
