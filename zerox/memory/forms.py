"""State from one form to another, losing only what the target form cannot represent.

Every function takes a part of one parameter that starts with a block of 256 elements, 1-D in memory order; or rows of a
table, each of which starts with a block.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zerox._C import SIGNED_MAP, UNSIGNED_MAP
from zerox.memory.stored import Stored
from zerox.plan.form import BLOCK_NUMEL
from zerox.rules.rule import StateSpec

LEAST_NORMAL = torch.finfo(torch.float32).tiny
HALF = 2**15  # of a bfloat16's last place, in units of float32's last place


# ---- what a rule keeps


def decode(stored: Stored) -> Tensor:
    """The values of 8-bit codes, float32 (csrc/math/dynamic_map.h); other values as they are."""
    if not stored.form.scaled:
        return stored.values
    assert stored.scales is not None
    return decode_with(stored.spec, stored.values, _spread(stored.scales, stored.values.shape[-1]))


def decode_with(spec: StateSpec, codes: Tensor, scales: Tensor) -> Tensor:
    """The same with a scale for each element."""
    return _map_on(codes.device, spec.signed)[codes.to(torch.int64)] * scales


def convert_(own: Stored, given: Stored) -> bool:
    """Copies ``given`` into ``own``, converted to its form; returns whether that rounded."""
    if given.form == own.form:
        own.values.copy_(given.values)
        if own.scales is not None and given.scales is not None:
            own.scales.copy_(given.scales)
        return False
    wide = decode(given)
    if own.form.scaled:
        _encode(wide.to(torch.float32), own)
    else:
        own.values.copy_(wide)
        if torch.promote_types(wide.dtype, own.values.dtype) == own.values.dtype:
            return False
    return not bool(same_values(decode(own), wide).all())


def same_values(first: Tensor, second: Tensor) -> Tensor:
    """Where two tensors have the same value, NaN too."""
    return (first == second) | (first.isnan() & second.isnan())


def _map_of(signed: bool) -> tuple[float, ...]:
    return SIGNED_MAP if signed else UNSIGNED_MAP


@functools.cache
def _map_on(device: torch.device, signed: bool) -> Tensor:
    """float32. An accelerator is waited for where it is made."""
    return torch.tensor(_map_of(signed), device=device)


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_NUMEL, dim=-1)[..., :numel]


def _encode(wide: Tensor, own: Stored) -> None:
    """The nearest codes, as the kernels choose them."""
    assert own.scales is not None
    known = torch.tensor(_map_of(own.spec.signed), dtype=torch.float64, device=wide.device)
    magnitudes = known[: int(known.argmax()) + 1]
    numel = wide.shape[-1]
    padded = torch.zeros(*wide.shape[:-1], own.scales.shape[-1] * BLOCK_NUMEL, device=wide.device)
    padded[..., :numel] = wide
    blocks = padded.view(*own.scales.shape, BLOCK_NUMEL)
    largest = blocks.abs().amax(dim=-1)
    scale = torch.where((blocks == largest[..., None]).any(dim=-1), largest, -largest)
    scale = torch.where(largest < LEAST_NORMAL, 0.0, scale)
    own.scales.copy_(torch.where(largest < torch.inf, scale, torch.nan))
    relative = (wide * _spread(1 / own.scales, numel)).clamp(-1, 1).nan_to_num(nan=0.0)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    found = torch.bucketize(relative.double().abs(), middles)
    if own.spec.signed:
        most = known.numel() - magnitudes.numel()  # -1 has no code
        found = torch.where(relative < 0, (known.numel() - found.clamp(max=most)) % known.numel(), found)
    own.values.copy_(found)


# ---- masters


def master_of(param: Tensor, remainder: Tensor) -> Tensor:
    """float32: the bfloat16 parameters with 16 more bits."""
    return (_bits(param) + remainder.to(torch.int32)).view(torch.float32)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """int16: a master's bits less those of the bfloat16 parameter that it rounds to; 0 if it rounds to another one.

    Masters midway between two parameters are rounded up in magnitude here, but float32 masters are rounded to even:
    those just on the wrong side lose the last of their 24 bits.
    """
    beyond = master.contiguous().view(torch.int32).to(torch.int64) - _bits(param)
    return torch.where(beyond.abs() <= HALF, beyond.clamp(-HALF, HALF - 1), 0).to(torch.int16)


def split_param(master: Tensor) -> Tensor:
    """bfloat16: the parameters that, with their remainders, are these masters. Rounded half away from zero, as the
    kernels round: see Note [A master as bf16 parameter plus remainder] in csrc/math/rounding.h."""
    halves = (master.contiguous().view(torch.int32).to(torch.int64) + HALF) >> 16
    return torch.where(master.isnan(), master.to(torch.bfloat16), halves.to(torch.int16).view(torch.bfloat16))


def follow_(master: Tensor, param: Tensor) -> None:
    """A float32 master that does not round to its 16-bit parameter becomes that: the parameter was written since."""
    stands = master.to(param.dtype).view(torch.int16) == param.view(torch.int16)
    if param.device.type != "cpu" or not bool(stands.all()):
        master.copy_(torch.where(stands, master, param.float()))


def rounding_to(param: Tensor, master: Tensor) -> Tensor:
    """float32 masters that each round to their 16-bit parameter: the reverse of remainder_of()."""
    up = (master.view(torch.int32) + 1).view(torch.float32)
    known = torch.where(up.to(param.dtype) == param, up, param.float())
    return torch.where(master.to(param.dtype) == param, master, known)


def _bits(param: Tensor) -> Tensor:
    """The bits of bfloat16 as float32."""
    return param.contiguous().view(torch.int16).to(torch.int32) << 16
