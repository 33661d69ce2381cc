"""Which elements of a shard a mask keeps, one bit each: see Note [Masks] in csrc/math/kept_bits.h."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4  # bytes behind the last bit: kMaskPadding in csrc/math/kept_bits.h


class Mask:
    """Of ``numel`` elements. It does not change: another choice is another Mask."""

    def __init__(self, kept: Tensor, slots: Collection[int]) -> None:
        """``kept``: bool ``[numel]``. ``slots``: the bucket's parameters that it is of; of others it keeps all."""
        self.slots = frozenset(slots)
        self.numel = kept.numel()
        self.bits = packed(kept)
        self._parts: dict[tuple[int, int], Tensor] = {}

    def kept(self, start: int = 0, stop: int | None = None) -> Tensor:
        """bool: of elements ``start`` to ``stop`` (None: to the last)."""
        stop = self.numel if stop is None else stop
        return unpacked(self.bits[start // 8 : -(-stop // 8)], stop - start // 8 * 8)[start % 8 :]

    def part(self, start: int, numel: int) -> Tensor:
        """The bits of elements ``start`` to ``start + numel`` as the kernels take them, from bit 0 on."""
        if (start, numel) not in self._parts:
            if start % 8:
                self._parts[start, numel] = packed(self.kept(start, start + numel))
            else:
                self._parts[start, numel] = self.bits[start // 8 :][: -(-numel // 8) + PADDING]
        return self._parts[start, numel]


def packed(kept: Tensor) -> Tensor:
    """uint8 ``[ceil(n / 8) + PADDING]``: element ``i`` is bit ``i % 8`` of byte ``i // 8``."""
    num_bytes = -(-kept.numel() // 8) + PADDING
    bits = functional.pad(kept.to(torch.uint8), (0, 8 * num_bytes - kept.numel())).view(-1, 8)
    return (bits << _places(kept)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, numel: int) -> Tensor:
    return ((bits[:, None] >> _places(bits)) & 1).view(-1)[:numel].bool()


def _places(beside: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device="cpu").to(beside.device)
