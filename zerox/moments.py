"""How the moments of a shard are stored: as they are computed, in bfloat16, or in 8 bits with a scale a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerox.large_pages import storage_bytes, zeros
from zerox.plan.layout import SMALL_NUMEL
from zerox.plan.span import SHARD_ALIGN

EIGHT_BIT = "8bit"
STATE_DTYPES = (torch.float32, torch.bfloat16, EIGHT_BIT)
BLOCK_NUMEL = 256  # elements that share a scale, counted from the parameter's start: kMomentBlock in csrc/math/moment.h
assert SHARD_ALIGN % BLOCK_NUMEL == 0

EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
MASTER_PLACE = 1  # beside the moments' in the update: see zerox/large_pages.py
PLACES = {EXP_AVG: 2, EXP_AVG_SQ: 3, MAX_EXP_AVG_SQ: 4}
SCALE = "_scale"  # behind a moment's name: its blocks' scales


def moment_dtype(param_dtype: torch.dtype, numel: int, state_dtype: torch.dtype | str) -> torch.dtype:
    """What the moments of a parameter are stored in; torch.uint8 stands for 8-bit codes.

    float64 parameters are updated in float64 throughout, and keep float64 moments whatever ``state_dtype`` says. In 8
    bits small parameters (under 4,096 elements) keep float32 moments: norms and biases, of which all together are few.
    """
    if param_dtype is torch.float64:
        return torch.float64
    if isinstance(state_dtype, torch.dtype):
        return state_dtype
    return torch.uint8 if numel >= SMALL_NUMEL else torch.float32


def moment_bytes(name: str, dtype: torch.dtype, shard_numel: int, on_host: bool) -> int:
    """Of one moment of a shard, scales included."""
    scales = shard_numel // BLOCK_NUMEL if dtype is torch.uint8 else 0
    return storage_bytes(shard_numel, dtype, on_host, PLACES[name]) + scales * torch.float32.itemsize


class Moments:
    """Both moments of a shard, the second one's maximum with amsgrad, and a scale for each block of 8-bit codes.

    All zero at first: the code 0 is zero, whatever the scale. The maps from codes to numbers are in
    csrc/math/dynamic_map.h: element = map[code] * scale, ``exp_avg`` in the signed map, the others in the unsigned one.
    """

    def __init__(self, dtype: torch.dtype, shard_numel: int, device: torch.device, amsgrad: bool) -> None:
        self.dtype = dtype
        names = [EXP_AVG, EXP_AVG_SQ]
        self.values = {name: zeros(shard_numel, dtype, device, PLACES[name]) for name in names}
        num_blocks = shard_numel // BLOCK_NUMEL
        coded = names if dtype is torch.uint8 else []
        self.scales = {name + SCALE: torch.zeros(num_blocks, device=device) for name in coded}
        if amsgrad:
            self.start_maximum()

    @property
    def has_maximum(self) -> bool:
        return MAX_EXP_AVG_SQ in self.values

    def start_maximum(self) -> None:
        """The second moment's maximum over the steps that come, for amsgrad."""
        like = self.values[EXP_AVG_SQ]
        self.values[MAX_EXP_AVG_SQ] = zeros(like.numel(), self.dtype, like.device, PLACES[MAX_EXP_AVG_SQ])
        if self.scales:
            self.scales[MAX_EXP_AVG_SQ + SCALE] = torch.zeros_like(self.scales[EXP_AVG_SQ + SCALE])

    def __iter__(self) -> Any:
        yield from self.values.values()
        yield from self.scales.values()

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.values[EXP_AVG], self.values[EXP_AVG_SQ], self.values.get(MAX_EXP_AVG_SQ)

    def scales_of(self, elements: slice) -> dict[str, Tensor]:
        """Views of the scales of these elements of the shard, which start with a block."""
        blocks = slice(elements.start // BLOCK_NUMEL, -(-elements.stop // BLOCK_NUMEL))
        return {name: scales[blocks] for name, scales in self.scales.items()}


def fits(given: torch.dtype, own: torch.dtype) -> bool:
    """Whether moments stored as ``given`` can be kept as ``own`` without losing anything."""
    return given == own or (given.is_floating_point and torch.promote_types(given, own) == own)
