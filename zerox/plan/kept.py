"""What is kept for each element of a shard, and the bytes that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from zerox.plan.form import FLOAT32, Form

SPACED_BYTES = 16 << 20  # a smaller array is not worth the spacing
PERIOD_BYTES = 64 << 10
MASK_PADDING = 4  # bytes behind the last bit: kMaskPadding in csrc/math/kept_bits.h


def storage_bytes(numel: int, itemsize: int, on_host: bool, place: int) -> int:
    """The bytes that zeros() of zerox/memory/pages.py allocates, which says what ``place`` is."""
    nbytes = numel * itemsize
    return nbytes + (PERIOD_BYTES if on_host and place and nbytes >= SPACED_BYTES else 0)


def mask_bytes(numel: int) -> int:
    """One bit an element: zerox/memory/mask.py."""
    return -(-numel // 8) + MASK_PADDING


@dataclass(frozen=True)
class Kept:
    """A number that is kept for each element, in this ``form``, under ``key`` in the optimizer's state.

    ``place``: its number among the arrays that the update walks together. ``is_master``: it is the exact value of a
    16-bit parameter, or the bits that this lacks.
    """

    key: str
    form: Form
    place: int
    is_master: bool = False

    def nbytes(self, numel: int, on_host: bool) -> int:
        """Of a bucket's shard."""
        values = storage_bytes(numel, self.form.itemsize, on_host, self.place)
        return values + self.form.num_scales(numel) * FLOAT32.itemsize

    def row_bytes(self, width: int) -> int:
        """Of one row of a table, which has scales of its own."""
        return width * self.form.itemsize + self.form.num_scales(width) * FLOAT32.itemsize
