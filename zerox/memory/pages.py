"""Memory for the arrays of the update: in large pages, and spaced so that they don't get in each other's way.

The update walks four or more arrays at once. If large ones start at neighbouring pages, modulo the sizes that caches
and predictors look at, it takes up to half as long again; and pages of 4 KiB end every 1,024 elements in all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerox import _C as C
from zerox.plan.kept import PERIOD_BYTES, storage_bytes

PAGED_BYTES = 4 << 20  # a smaller array is not worth pages of 2 MiB
STEP_BYTES = 8 << 10
LINE_BYTES = 64


def in_large_pages(made: Tensor) -> Tensor:
    """The tensor itself, which nobody has written yet. Its first writes take a tenth of the time, too."""
    if made.device.type == "cpu" and made.nbytes >= PAGED_BYTES:
        C.advise_large_pages(made)
    return made


def zeros(numel: int, dtype: torch.dtype, device: torch.device, place: int = 0) -> Tensor:
    """The same as empty(), all zero."""
    return empty(numel, dtype, device, place).zero_()


def empty(numel: int, dtype: torch.dtype, device: torch.device, place: int = 0) -> Tensor:
    """``[numel]``, with whatever is there, on Linux in large pages, which need no setup: see csrc/cpu/large_pages.h.

    ``place``: its number, from 1 on, among the arrays that are walked together; 0: wherever the allocator likes.
    """
    nbytes = storage_bytes(numel, dtype.itemsize, device.type == "cpu", place)
    made = in_large_pages(torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device))
    if made.numel() == numel:
        return made
    start = (place * STEP_BYTES + LINE_BYTES - made.data_ptr()) % PERIOD_BYTES // dtype.itemsize
    return made[start : start + numel]
