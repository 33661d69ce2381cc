"""Half-open ranges of elements."""

from __future__ import annotations

from dataclasses import dataclass

SHARD_ALIGN = 256  # elements: a block of the norm, a 128-byte line of 16-bit values, a block of 8-bit state


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Span) -> Span | None:
        """The elements that both have, or None. An empty span lies where it starts."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if start < stop or (self.numel == 0 and other.start <= self.start < other.stop):
            return Span(start, max(start, stop))
        return None


def align_up(numel: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``numel``."""
    return -(-numel // multiple) * multiple
