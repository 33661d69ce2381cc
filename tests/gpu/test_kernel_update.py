"""The update on a device: the CPU kernel's bits, and the rule in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.gpu.twins import (
    CPU,
    FENCE,
    Fences,
    in_blocks,
    mixed_options,
    num_fitting,
    ragged_segments,
    same_bits_but_nan,
    strew,
    twin_of,
)
from tests.kernels.rule import (
    CONFIG_IDS,
    EVERY_CONFIG,
    MASTERS,
    VARIANT_IDS,
    VARIANTS,
    assert_one_step_is_the_rule,
)
from tests.kernels.shards import DTYPES, RULES, Shard, options_table, same_bits, segments_of
from zerox.rules.rule import Rule

KINDS = [(torch.float64, None), (torch.float32, None), *MASTERS]
# Every gradient beside every parameter, but for fp64 ones beside narrower parameters, which are refused.
COMBINATIONS = [
    (dtype, master, grad_dtype)
    for dtype, master in KINDS
    for grad_dtype in DTYPES
    if grad_dtype is not torch.float64 or dtype is torch.float64
]

NARROW = [each for each in COMBINATIONS if each[0] is not torch.float64]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def ragged_shard(
    seed: int,
    dtype: torch.dtype,
    master: str | None,
    grad_dtype: torch.dtype,
    variant: tuple[Rule, dict[str, Any]],
    state_dtype: torch.dtype = torch.float32,
) -> Shard:
    """Segments of all lengths, some absent, each with options and a step count of its own."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rule, config = variant
    segments, numel = ragged_segments(rng, groups=num_fitting(rule, config))
    if state_dtype is torch.uint8:
        segments, numel = in_blocks(segments)
    own: dict[str, Any] = {"segments": segments, "state_dtype": state_dtype, "rule": rule}
    shard = Shard(numel, dtype, grad_dtype, master, config, 1, seed, **own)
    strew(shard.grad, generator)
    if master is None:
        strew(shard.param, generator)
    shard.present.copy_(torch.randint(0, 4, shard.present.shape, generator=generator) > 0)
    shard.steps.copy_(torch.tensor([rng.choice([0, 1, 2, 9, 1000, 10**6]) for _ in range(len(segments))]))
    return shard


def assert_same_step(shard: Shard, options: torch.Tensor, grad_scale: float | None, offset: int, device: Any) -> None:
    fences = Fences(device)
    twin = twin_of(shard, fences, offset)
    before = [tensor.clone() for tensor in shard.tensors()]
    shard.update(options, grad_scale)
    twin.update(options.to(device), grad_scale)
    for ours, theirs in zip(twin.tensors(), shard.tensors(), strict=True):
        assert same_bits(ours.cpu(), theirs)
    fences.check()
    assert not all(same_bits(old, new) for old, new in zip(before, shard.tensors(), strict=True))


@pytest.mark.parametrize(("rule", "config"), VARIANTS, ids=VARIANT_IDS)
@pytest.mark.parametrize("offset", [0, 1, 3], ids=["aligned", "off by 1", "off by 3"])
@pytest.mark.parametrize(("dtype", "master", "grad_dtype"), COMBINATIONS, ids=str)
def test_a_step_has_the_cpu_kernel_s_bits(
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
    master: str | None,
    grad_dtype: torch.dtype,
    offset: int,
    rule: Rule,
    config: dict[str, Any],
) -> None:
    shard = ragged_shard(seed, dtype, master, grad_dtype, (rule, config))
    grad_scale = random.Random(seed).choice([None, 1.0, 0.37, 1 / 1024])
    assert_same_step(shard, mixed_options(rule), grad_scale, offset, device)


@pytest.mark.parametrize(("rule", "config"), VARIANTS, ids=VARIANT_IDS)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "off by 1"])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("dtype", "master", "grad_dtype"), NARROW, ids=str)
def test_with_smaller_moments_too(
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
    master: str | None,
    grad_dtype: torch.dtype,
    state_dtype: torch.dtype,
    offset: int,
    rule: Rule,
    config: dict[str, Any],
) -> None:
    shard = ragged_shard(seed, dtype, master, grad_dtype, (rule, config), state_dtype)
    assert_same_step(shard, mixed_options(rule), 0.37, offset, device)


@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 2047, 2048, 2049, 100_003])
@pytest.mark.parametrize(("dtype", "master"), KINDS, ids=str)
def test_tails_too(device: torch.device, seed: int, dtype: torch.dtype, master: str | None, numel: int) -> None:
    assert_same_step(Shard(numel, dtype, master_kind=master, step=3, seed=seed), options_table(), None, 0, device)


@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, None), (torch.bfloat16, "remainder"), (torch.float16, "fp32")], ids=str
)
def test_more_tiles_than_fit_on_a_device_at_a_time(
    device: torch.device, seed: int, dtype: torch.dtype, master: str | None
) -> None:
    segments = segments_of(3_000_001, 700_007, 1, 1_300_000, gap=77)
    shard = Shard(int(segments[-1, 1]) + 5, dtype, master_kind=master, step=5, seed=seed, segments=segments)
    assert_same_step(shard, options_table(), 0.5, 0, device)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("dtype", "master"), KINDS[1:], ids=str)
@each_rule
def test_shards_of_all_sizes_together_have_the_bits_of_each_alone(
    device: torch.device, seed: int, dtype: torch.dtype, master: str | None, state_dtype: torch.dtype, rule: Rule
) -> None:
    """More of them than one launch takes, with large ones among them, and an empty one."""
    rng = random.Random(seed)
    fences = Fences(device)
    options = mixed_options(rule)[: num_fitting(rule, {})]
    grad_scale = torch.tensor(0.37, dtype=torch.float64)
    sizes = [*(rng.randrange(1, 40_000) for _ in range(27)), 0, 1_000_003, 300_000]
    rng.shuffle(sizes)
    shards = [
        Shard(numel, dtype, None, master, {}, rng.randrange(9), seed + i, state_dtype=state_dtype, rule=rule)
        for i, numel in enumerate(sizes)
    ]
    for shard in shards:
        shard.segments[0, 2] = rng.randrange(len(options))
        shard.present[0] = rng.random() < 0.9
    twins = [twin_of(shard, fences, rng.choice([0, 0, 1])) for shard in shards]
    for shard in shards:
        shard.update(options, 0.37)
    Shard.update_together(twins, options.to(device), grad_scale.to(device))
    for shard, twin in zip(shards, twins, strict=True):
        for ours, theirs in zip(twin.tensors(), shard.tensors(), strict=True):
            assert same_bits(ours.cpu(), theirs)
    fences.check()


def test_every_root_is_rounded_as_on_the_cpu(device: torch.device) -> None:
    """All mantissas of two octaves, which are all there are. Then come a quotient by a constant and one by the root."""
    every = 1 if device.type in ("cpu", "cuda") else 5003
    seconds = torch.arange(0x40000000, 0x41000000, every, dtype=torch.int32).view(torch.float32)
    shard = Shard(seconds.numel(), step=1)
    shard.param.zero_()
    shard.grad.zero_()
    shard.exp_avg.fill_(1.0)
    shard.exp_avg_sq.copy_(seconds)  # halved: no digit is lost
    assert_same_step(shard, options_table(betas=(0.5, 0.5), eps=0.0), None, 0, device)


def test_without_elements_segments_or_gradients_nothing_changes(device: torch.device) -> None:
    no_segments = Shard(300)
    no_segments.segments = torch.empty(0, 5, dtype=torch.int64)
    no_segments.present, no_segments.steps = no_segments.present[:0], no_segments.steps[:0]
    absent = Shard(300)
    absent.present.zero_()
    for shard in (Shard(0), no_segments, absent):
        fences = Fences(device)
        twin = twin_of(shard, fences)
        twin.update(options_table().to(device))
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert same_bits(getattr(twin, name).cpu(), getattr(shard, name))
        counted = [1] if shard.numel == 0 else [0] * len(shard.steps)  # an empty parameter may have a gradient
        assert twin.steps.tolist() == counted
        fences.check()


def test_many_segments_as_a_model_of_many_layers_has(device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    segments = segments_of(*[rng.choice([1, 64, 300, 4096]) for _ in range(3000)], gap=1)
    shard = Shard(int(segments[-1, 1]), torch.bfloat16, master_kind="remainder", seed=seed, segments=segments)
    shard.steps.copy_(torch.arange(len(segments)))
    shard.present[::7] = 0
    assert_same_step(shard, options_table(), None, 0, device)


@each_rule
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("dtype", "master"), KINDS, ids=str)
def test_nan_and_infinity_end_where_they_do_on_the_cpu(
    device: torch.device, seed: int, dtype: torch.dtype, master: str | None, value: float, rule: Rule
) -> None:
    shard = Shard(5000, dtype, master_kind=master, step=2, seed=seed, rule=rule)
    shard.grad[::17] = value
    *_, last = shard.states.values()
    last[::31] = torch.inf
    last[::13] = -0.0
    twin = twin_of(shard, Fences(device))
    shard.update()
    twin.update()
    assert not torch.isfinite(shard.states[shard.kept[0].key][0])
    assert same_bits_but_nan(twin.exact(), shard.exact())
    for name in ("param", *shard.states):
        assert same_bits_but_nan(getattr(twin, name), getattr(shard, name))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "config"), EVERY_CONFIG, ids=CONFIG_IDS)
@pytest.mark.parametrize(("dtype", "master"), KINDS[1:], ids=str)
def test_one_step_is_the_rule_in_float64_up_to_fp32_arithmetic(
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
    master: str | None,
    rule: Rule,
    config: dict[str, Any],
    grad_dtype: torch.dtype,
) -> None:
    shard = Shard(5_003, dtype, grad_dtype, master, config, step=7, seed=seed, rule=rule)
    assert_one_step_is_the_rule(twin_of(shard, Fences(device)))


def test_the_comparison_can_fail(device: torch.device, seed: int) -> None:
    shard = Shard(1000, seed=seed)
    twin = twin_of(shard, Fences(device))
    twin.update(options_table(lr=1e-2 * (1 + 1e-6)).to(device))
    shard.update(options_table(lr=1e-2))
    assert not same_bits(twin.param.cpu(), shard.param)


@pytest.mark.skipif(FENCE == 0, reason="no fences under a memory checker")
def test_a_fence_shows_what_was_written_past_an_end() -> None:
    for first in (-1, 4):
        fences = Fences(CPU)
        room = fences.room(4, torch.float32)
        room.as_strided((1,), (1,), room.storage_offset() + first).zero_()
        with pytest.raises(AssertionError, match="outside"):
            fences.check()
