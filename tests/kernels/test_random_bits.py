"""The bits that round moments: no bias, and nothing in common between elements, moments, steps or parameters.

On the twin, which tests/kernels/test_stored_moments.py holds against the kernels bit for bit. The bits are a hash: the
numbers are the same in every run. Chance alone takes one of a million of them past 5 standard deviations.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.stored import random_bits, stochastic_bf16

NUM = 1 << 17
SIGMAS = 5.0
STEP, PARAM = 1000, 3
ELEMENTS = torch.arange(NUM)


def bits_of(words: Tensor) -> Tensor:
    """float64 ``[n, 32]``: each bit as -1 or 1, of mean 0 and variance 1."""
    return ((words[:, None] >> torch.arange(32)) & 1).double() * 2 - 1


def assert_of_mean_zero(values: Tensor, what: str) -> None:
    """Each column of independent values of variance 1."""
    z = values.mean(dim=0) * math.sqrt(values.shape[0])
    assert z.abs().max() < SIGMAS, f"{what}: {z.abs().max():.1f} standard deviations"


def test_each_bit_is_set_as_often_as_not() -> None:
    for step, param in [(STEP, PARAM), (1, 0), (2, 0), (10**6, 2**40)]:
        assert_of_mean_zero(bits_of(random_bits(step, param, ELEMENTS)), f"step {step}, parameter {param}")


def assert_uncorrelated(ours: Tensor, theirs: Tensor) -> None:
    """Every column with every column."""
    z = ours.T @ theirs / math.sqrt(ours.shape[0])
    assert z.abs().max() < SIGMAS, f"{z.abs().max():.1f} standard deviations"


# What lies near each other in training. The last one differs in the upper half of the element's index only.
NEIGHBOURS = {
    "the next element": (STEP, PARAM, ELEMENTS + 1),
    "the element 16 behind": (STEP, PARAM, ELEMENTS + 16),
    "the element 256 behind": (STEP, PARAM, ELEMENTS + 256),
    "the next step": (STEP + 1, PARAM, ELEMENTS),
    "100 steps on": (STEP + 100, PARAM, ELEMENTS),
    "the next parameter": (STEP, PARAM + 1, ELEMENTS),
    "step and parameter exchanged": (PARAM, STEP, ELEMENTS),
    "the element 2^32 behind": (STEP, PARAM, ELEMENTS + 2**32),
}


@pytest.mark.parametrize("where", NEIGHBOURS)
def test_no_bit_tells_of_any_bit_of_a_neighbour(where: str) -> None:
    ours, theirs = bits_of(random_bits(STEP, PARAM, ELEMENTS)), bits_of(random_bits(*NEIGHBOURS[where]))
    assert_uncorrelated(ours, theirs)


def test_the_halves_that_round_the_two_moments_have_nothing_in_common() -> None:
    bits = bits_of(random_bits(STEP, PARAM, ELEMENTS))
    assert_uncorrelated(bits[:, :16], bits[:, 16:])


def test_a_correlation_would_be_noticed() -> None:
    ours = bits_of(random_bits(STEP, PARAM, ELEMENTS))
    alike = torch.where((torch.arange(NUM) % 50 == 0)[:, None], ours, bits_of(random_bits(STEP, PARAM, ELEMENTS + 1)))
    with pytest.raises(AssertionError, match="standard deviations"):
        assert_uncorrelated(ours, alike)


@pytest.mark.parametrize("half", [0, 16], ids=["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [1.0 + 2**-16, 1.0 + 0.3 * 2**-7, -3.14159, 7e-12, 1e-41, 1.0 + 2**-7 - 2**-23])
def test_the_mean_of_what_is_rounded_is_what_was_rounded(value: float, half: int) -> None:
    """Over elements, and over steps: rounding up has the probability f, so the mean has a variance of f (1 - f) / n."""
    exact = torch.tensor(value, dtype=torch.float32)
    low = int(exact.view(torch.int32)) & 0xFFFF
    unit = float(exact.abs().view(torch.int32).bitwise_and(~0xFFFF).add(0x10000).view(torch.float32)) - float(
        exact.abs().view(torch.int32).bitwise_and(~0xFFFF).view(torch.float32)
    )
    share = low / 65536
    over_steps = torch.cat([random_bits(step, PARAM, torch.arange(64)) for step in range(1, 1025)])
    for words in (random_bits(STEP, PARAM, ELEMENTS), over_steps):
        rounded = stochastic_bf16(exact.expand(len(words)).contiguous(), (words >> half) & 0xFFFF).double()
        sigma = unit * math.sqrt(share * (1 - share) / len(words))
        assert abs(float(rounded.mean()) - float(exact)) < SIGMAS * sigma
