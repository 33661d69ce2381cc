"""Moments and masters from one way of storing them to another, without losing more than the new one can't hold.

Every function takes a part of one parameter that starts with a block of 256 elements, 1-D in memory order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerox._C import SIGNED_MAP, UNSIGNED_MAP
from zerox.moments import BLOCK_NUMEL, EXP_AVG, fits

LEAST_NORMAL = torch.finfo(torch.float32).tiny
HALF = 2**15  # of the last place of a bfloat16, in those of float32


# ---- moments


def decoded(name: str, values: Tensor, scales: Tensor | None) -> Tensor:
    """What 8-bit codes stand for, float32 (csrc/math/dynamic_map.h); other moments as they are."""
    if values.dtype is not torch.uint8:
        return values
    assert scales is not None
    known = torch.tensor(_map_of(name), device=values.device)
    return known[values.to(torch.int64)] * _spread(scales, values.numel())


def store_moment(name: str, given: Tensor, given_scales: Tensor | None, own: Tensor, own_scales: Tensor | None) -> bool:
    """Copies a moment into ``own``, converted to its form; returns whether that could round."""
    if given.dtype == own.dtype:
        own.copy_(given)
        if own_scales is not None and given_scales is not None:
            own_scales.copy_(given_scales)
        return False
    wide = decoded(name, given, given_scales)
    if own.dtype is torch.uint8:
        assert own_scales is not None
        _encode(name, wide.to(torch.float32), own, own_scales)
        return True
    own.copy_(wide)
    return not fits(wide.dtype, own.dtype)


def _map_of(name: str) -> tuple[float, ...]:
    return SIGNED_MAP if name == EXP_AVG else UNSIGNED_MAP


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_NUMEL)[:numel]


def _encode(name: str, wide: Tensor, codes: Tensor, scales: Tensor) -> None:
    """The nearest codes, as the kernels choose them."""
    known = torch.tensor(_map_of(name), dtype=torch.float64, device=wide.device)
    magnitudes = known[: int(known.argmax()) + 1]
    padded = torch.zeros(scales.numel() * BLOCK_NUMEL, device=wide.device)
    padded[: wide.numel()] = wide
    blocks = padded.view(-1, BLOCK_NUMEL)
    largest = blocks.abs().amax(dim=1)
    scale = torch.where((blocks == largest[:, None]).any(dim=1), largest, -largest)
    scale = torch.where(largest < LEAST_NORMAL, 0.0, scale)
    scales.copy_(torch.where(largest < torch.inf, scale, torch.nan))
    relative = (wide * _spread(1 / scales, wide.numel())).clamp(-1, 1).nan_to_num(nan=0.0)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    found = torch.bucketize(relative.double().abs(), middles)
    if name == EXP_AVG:
        most = known.numel() - magnitudes.numel()  # -1 has no code
        found = torch.where(relative < 0, (known.numel() - found.clamp(max=most)) % known.numel(), found)
    codes.copy_(found)


# ---- masters


def master_of(param: Tensor, remainder: Tensor) -> Tensor:
    """float32: the bfloat16 parameters with 16 more bits."""
    return (_bits(param) + remainder.to(torch.int32)).view(torch.float32)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """int16: what a master has beyond the bfloat16 parameter that it rounds to; 0 where it rounds to another one.

    Masters in the middle between two parameters are rounded up in magnitude here, and to the even one by float32
    masters: those which lie just on the wrong side lose the last of their 24 bits.
    """
    beyond = master.contiguous().view(torch.int32).to(torch.int64) - _bits(param)
    return torch.where(beyond.abs() <= HALF, beyond.clamp(-HALF, HALF - 1), 0).to(torch.int16)


def rounding_to(param: Tensor, master: Tensor) -> Tensor:
    """float32 masters of which each rounds to its 16-bit parameter: remainder_of() the other way round."""
    up = (master.view(torch.int32) + 1).view(torch.float32)
    known = torch.where(up.to(param.dtype) == param, up, param.float())
    return torch.where(master.to(param.dtype) == param, master, known)


def _bits(param: Tensor) -> Tensor:
    """Of bfloat16 as float32."""
    return param.contiguous().view(torch.int16).to(torch.int32) << 16
