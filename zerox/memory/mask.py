"""Which elements of a shard a mask keeps, one bit each: see Note [Masks] in csrc/math/kept_bits.h."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import functional

from zerox.plan.kept import mask_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of parameters that can be masked


class Mask:
    """Of ``numel`` elements, as :func:`packed` has them. It does not change: another choice is another Mask.

    ``slots``: the bucket's parameters that it is of; of others it keeps all.
    """

    def __init__(self, bits: Tensor, numel: int, slots: Collection[int]) -> None:
        self.slots = frozenset(slots)
        self.numel = numel
        self.bits = bits
        self._parts: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of(cls, kept: Tensor, slots: Collection[int]) -> Mask:
        """``kept``: bool ``[numel]``."""
        return cls(pack_bits(kept), kept.numel(), slots)

    def kept(self, start: int = 0, stop: int | None = None) -> Tensor:
        """bool: of elements ``start`` to ``stop`` (None: to the last)."""
        stop = self.numel if stop is None else stop
        return unpack_bits(self.bits[start // 8 : -(-stop // 8)], stop - start // 8 * 8)[start % 8 :]

    def with_replaced(self, start: int, kept: Tensor) -> Mask:
        """Another, with these elements from ``start`` on."""
        first, last = start // 8, -(-(start + kept.numel()) // 8)
        around = unpack_bits(self.bits[first:last], 8 * (last - first))
        around[start - 8 * first :][: kept.numel()] = kept
        bits = self.bits.clone()
        bits[first:last] = pack_bits(around)[: last - first]
        return Mask(bits, self.numel, self.slots)

    def part(self, start: int, numel: int) -> Tensor:
        """The bits of elements ``start`` to ``start + numel`` as the kernels take them, from bit 0 on."""
        if (start, numel) not in self._parts:
            if start % 8:
                self._parts[start, numel] = pack_bits(self.kept(start, start + numel))
            else:
                self._parts[start, numel] = self.bits[start // 8 :][: mask_bytes(numel)]
        return self._parts[start, numel]


def stands_for(glob: str, name: str, param: Tensor) -> bool:
    """A pattern stands for matrices and what has more dimensions: biases and norms only by their full name."""
    if param.dtype not in DTYPES or param.dim() == 0:
        return False
    return name == glob or (param.dim() > 1 and fnmatchcase(name, glob))


def pack_bits(kept: Tensor) -> Tensor:
    """uint8 ``[ceil(n / 8) + MASK_PADDING]``: element ``i`` is bit ``i % 8`` of byte ``i // 8``."""
    num_bytes = mask_bytes(kept.numel())
    bits = functional.pad(kept.to(torch.uint8), (0, 8 * num_bytes - kept.numel())).view(-1, 8)
    return (bits << _places(kept)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    return ((bits[:, None] >> _places(bits)) & 1).view(-1)[:numel].bool()


def _places(beside: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device="cpu").to(beside.device)
