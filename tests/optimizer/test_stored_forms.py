"""Moments and masters from one form to another: exact where the new form holds it all, else the nearest there is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels import stored
from tests.kernels.shards import same_bits
from zerox._C import SIGNED_MAP, UNSIGNED_MAP
from zerox.memory.forms import convert_, decode, master_of, remainder_of, rounding_to
from zerox.memory.stored import Stored
from zerox.rules.adam import ADAM

NUMEL = 700  # two blocks and a part of one
SPECS = {spec.key: spec for spec in ADAM.states}


def coded(name: str, numel: int = NUMEL) -> Stored:
    return Stored.given(SPECS[name], torch.empty(numel, dtype=torch.uint8), torch.empty(-(-numel // 256)))


def moments(name: str, numel: int = NUMEL) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(numel, generator=generator) * torch.logspace(-12, 2, numel)
    wide[: min(5, numel)] = torch.tensor([0.0, 1e-39, -1e-39, 3.0, -3.0])[: min(5, numel)]
    wide[512:] *= -1  # a block whose largest is negative
    return wide if name == "exp_avg" else wide.square()


def test_the_maps_are_the_kernels_own() -> None:
    assert torch.equal(torch.tensor(SIGNED_MAP), stored.dynamic_map(True))
    assert torch.equal(torch.tensor(UNSIGNED_MAP), stored.dynamic_map(False))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_eight_bits_are_coded_and_decoded_as_by_the_kernels(name: str) -> None:
    wide, signed = moments(name), name == "exp_avg"
    own = coded(name)
    assert convert_(own, Stored.given(SPECS[name], wide))
    expected, expected_scales = stored.encode(wide, signed)
    assert same_bits(own.values, expected)
    assert same_bits(own.scales, expected_scales)
    assert same_bits(decode(own), stored.decode(own.values, own.scales, signed))
    again = coded(name)
    assert not convert_(again, own)
    assert same_bits(again.values, own.values)
    assert same_bits(again.scales, own.scales)


def test_what_is_not_finite_is_not_finite_in_eight_bits() -> None:
    wide = moments("exp_avg")
    wide[300] = torch.nan
    own = coded("exp_avg")
    convert_(own, Stored.given(own.spec, wide))
    assert own.scales.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_block_of_subnormals_is_zero_as_by_the_kernels(name: str) -> None:
    wide = torch.full((300,), 1e-39)
    wide[256:] = 1e-37
    own = coded(name, 300)
    convert_(own, Stored.given(own.spec, wide))
    for ours, theirs in zip((own.values, own.scales), stored.encode(wide, name == "exp_avg"), strict=True):
        assert same_bits(ours, theirs)
    assert (decode(own) > 0).tolist() == [False] * 256 + [True] * 44


FORMS = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize(("given", "own"), list(itertools.product(FORMS, FORMS)), ids=str)
def test_rounding_is_told_where_it_can_happen_and_nowhere_else(given: torch.dtype, own: torch.dtype) -> None:
    wide = Stored.given(SPECS["exp_avg"], moments("exp_avg"))

    def in_form(dtype: torch.dtype) -> Stored:
        return coded("exp_avg") if dtype is torch.uint8 else Stored.given(wide.spec, torch.empty(NUMEL, dtype=dtype))

    then, now = in_form(given), in_form(own)
    convert_(then, wide)
    rounded = convert_(now, then)
    exact = decode(then).double()
    error = (decode(now).double() - exact).abs()
    if not rounded:
        assert not bool(error.any())
    else:
        assert own is torch.uint8 or FORMS.index(own) > FORMS.index(given) or given is torch.uint8
        assert bool((error <= (0.015 if own is torch.uint8 else 2**-8) * exact.abs().max()).all())


def around_ties(sign: float) -> tuple[Tensor, Tensor]:
    """bfloat16 parameters, and float32 masters in their half-open intervals, both ends among them."""
    generator = torch.Generator().manual_seed(0)
    param = (torch.randn(500, generator=generator).abs() * sign).to(torch.bfloat16)
    remainder = torch.randint(-(2**15), 2**15, (500,), generator=generator, dtype=torch.int32).to(torch.int16)
    remainder[:100] = -(2**15)
    remainder[100:200] = 2**15 - 1
    return param, remainder


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_masters_go_to_float32_and_back_but_for_the_last_bit_of_ties(sign: float) -> None:
    param, remainder = around_ties(sign)
    exact = master_of(param, remainder)
    master = rounding_to(param, exact)
    assert torch.equal(master.to(torch.bfloat16), param), "or the next step would drop it"
    off = master.view(torch.int32) - exact.view(torch.int32)
    assert set(off.tolist()) == {0, 1}
    assert bool((remainder[off == 1] == -(2**15)).all()), "only in the middle between two parameters"
    back = remainder_of(param, master)
    assert torch.equal(back.int(), remainder.int() + off)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_float32_masters_go_to_remainders_but_for_the_last_bit_of_ties(sign: float) -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(500, generator=generator).abs() * sign
    master[:200] = ((master[:200].view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32)
    param = master.to(torch.bfloat16)
    back = master_of(param, remainder_of(param, master))
    off = (master.view(torch.int32) - back.view(torch.int32)).abs()
    assert set(off.tolist()) == {0, 1}
    assert not bool(off[200:].any())


def test_a_master_of_another_value_gives_way_to_the_parameter() -> None:
    param = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)
    master = torch.tensor([1.25, -2.0, 7.0])
    assert remainder_of(param, master).tolist() == [0, 0, 0]
    assert rounding_to(param, master).tolist() == [1.0, -2.0, 0.5]
