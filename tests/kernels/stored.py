"""Moments as they are stored, in plain torch and Python integers: the twin of csrc/math/{random,dynamic_map}.h."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

SEED = 0x7A65726F78
BLOCK = 256
EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"


# ---- the hash


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def mix32(x: Tensor) -> Tensor:
    """int64 in [0, 2^32). Products wrap at 2^64, which leaves the lower 32 bits as they are."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def random_bits(step: int, param: int, elements: Tensor) -> Tensor:
    """32 bits as int64 for each of ``elements`` (int64) of the parameter of number ``param``."""
    key = mix64(mix64(SEED ^ param) ^ step)
    upper = ((elements >> 32) * 0x9E3779B9) & 0xFFFFFFFF
    return mix32(mix32((elements & 0xFFFFFFFF) ^ (key & 0xFFFFFFFF)) ^ (key >> 32) ^ upper)


def stochastic_bf16(values: Tensor, random: Tensor) -> Tensor:
    """float32 to bfloat16: the magnitude plus ``random`` (int64 in [0, 2^16)) units of its 2^-16, rounded down."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + random).clamp(max=0x7F7FFFFF)
    other = torch.where(magnitude > 0x7F800000, magnitude | 0x400000, magnitude)
    rounded = torch.where(magnitude < 0x7F800000, rounded, other)
    upper = ((bits & 0x80000000) | rounded) >> 16
    return torch.where(upper >= 2**15, upper - 2**16, upper).to(torch.int16).view(torch.bfloat16)


# ---- the map


@cache
def magnitudes(signed: bool) -> tuple[float, ...]:
    """From the paper's construction, in exact fractions, each rounded once to float32: ascending, 0 first."""
    found = [Fraction(0)]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        borders = [Fraction(1, 10) + Fraction(9, 10) * i / parts for i in range(parts + 1)]
        means = [(a + b) / 2 for a, b in itertools.pairwise(borders)]
        found += [mean * Fraction(10) ** (decade - 6) for mean in means]
    return tuple(nearest_float32(value) for value in [*found, Fraction(1)])


def nearest_float32(value: Fraction) -> float:
    guess = torch.tensor(float(value), dtype=torch.float32)
    near = [torch.nextafter(guess, torch.tensor(to)) for to in (-torch.inf, torch.inf)] + [guess]
    return float(min(near, key=lambda x: abs(Fraction(float(x)) - value)))


def dynamic_map(signed: bool) -> Tensor:
    """float32 ``[256]`` by code: magnitudes upwards from 0, then the negatives that there are, upwards to 0."""
    upwards = list(magnitudes(signed))
    return torch.tensor(upwards + [-x for x in reversed(upwards[1 : 257 - len(upwards)])])


def scales_of(values: Tensor) -> Tensor:
    """float32, one a block: the value of largest magnitude, the positive one of two; NaN where one is not finite, and 0
    where none is as large as the least normal number."""
    found = []
    for block in values.split(BLOCK):
        largest = block.abs().max()
        if not bool(largest < torch.inf):
            found.append(torch.tensor(torch.nan))
        elif bool(largest < torch.finfo(torch.float32).tiny):
            found.append(torch.tensor(0.0))
        else:
            found.append(largest if bool((block == largest).any()) else -largest)
    return torch.stack(found) if found else torch.empty(0)


def spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:numel]


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(uint8 codes, scales) of one parameter's part that starts with a block: the nearest magnitude, by comparison with
    all. Of two that are equally near the smaller one."""
    scales = scales_of(values)
    relative = (values * (1 / spread(scales, values.numel()))).clamp(-1, 1)
    known = torch.tensor(magnitudes(signed), dtype=torch.float64)
    codes = torch.cat(
        [
            (part.double().abs()[:, None] - known).abs().argmin(dim=1)
            for part in relative.nan_to_num(nan=0.0).split(1024)
        ]
        or [torch.empty(0, dtype=torch.int64)]
    )
    if signed:
        codes = torch.where(relative < 0, (256 - codes.clamp(max=127)) % 256, codes)
    return codes.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    return dynamic_map(signed)[codes.to(torch.int64)] * spread(scales, codes.numel())
