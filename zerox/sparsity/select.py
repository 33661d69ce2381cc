"""The k-th smallest of numbers that are spread over ranks, exactly and without gathering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DIGITS = ((20, 11), (10, 10), (0, 10))  # of 31 bits: each one's lowest bit, and how many


Keys = Callable[[], Tensor]  # makes them anew each time: all at once would take as much as the optimizer's state


def keys_of(values: Tensor) -> Tensor:
    """int32, in the order of the magnitudes of float32 ``values``: their bits without the sign. NaN comes last."""
    return values.float().view(torch.int32) & 0x7FFFFFFF


def kth_smallest(pools: Sequence[Sequence[Keys]], ks: Sequence[int], add_up: Callable[[Tensor], None]) -> list[int]:
    """Of each pool the ``k``-th smallest key, counted from 1 over all ranks; -1 where ``k`` is 0 or less.

    ``pools``: what makes this rank's keys (:func:`keys_of`) of each, 1-D, on any device. ``add_up(counts)``: adds int64
    tensors of the host up over the ranks, in place. Three histograms of 11, 10 and 10 bits say it all: 32 KiB for each
    pool.
    """
    left = torch.tensor([max(k, 1) for k in ks], device="cpu")
    found = torch.zeros(len(pools), dtype=torch.int64, device="cpu")
    for low, width in DIGITS:
        counts = torch.zeros(len(pools), 2**width, dtype=torch.int64, device="cpu")
        for row, pool in enumerate(pools):
            for make_keys in pool:
                keys = make_keys()
                among = keys[(keys >> (low + width)) == int(found[row])]
                counts[row] += torch.bincount((among >> low) & (2**width - 1), minlength=2**width).cpu()
        add_up(counts)
        up_to = counts.cumsum(1)
        digit = (up_to < left[:, None]).sum(1)
        before = torch.where(digit > 0, up_to.gather(1, (digit - 1).clamp(min=0)[:, None])[:, 0], 0)
        left, found = left - before, (found << width) | digit
    return [key if k > 0 else -1 for key, k in zip(found.tolist(), ks, strict=True)]
