"""States in bf16 and 8 bits: a step is decode, the update of fp32 states, encode, bit for bit with the twin's."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import stored
from tests.kernels.rule import CONFIG_IDS, EVERY_CONFIG, MASTERS, VARIANTS
from tests.kernels.shards import RULES, Shard, options_table, same_bits
from zerox import _C
from zerox.rules.rule import Rule
from zerox.rules.sgd import SGD

KINDS = [torch.bfloat16, torch.uint8]
PARAMS = [(torch.float32, None), *MASTERS]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def block_segments(*numels: int, param_starts: tuple[int, ...] = ()) -> tuple[Tensor, int]:
    """Parameters that start with a block each, numbered at random, and the numel of their shard."""
    rows, start = [], 0
    for place, numel in enumerate(numels):
        param_start = param_starts[place] if param_starts else 0
        rows.append([start, start + numel, 0, random.Random(place).randrange(2**40), param_start])
        start += -(-numel // stored.BLOCK) * stored.BLOCK
    return torch.tensor(rows), start + stored.BLOCK


def make_shard(kind: torch.dtype, **changes: Any) -> Shard:
    # The last one is more than a thread takes at a time.
    segments, numel = block_segments(4096, 700, 256, 1, 20_000, param_starts=(0, 512, 2**32 - 256, 0, 2**33 - 2048))
    return Shard(numel, **({"segments": segments, "step": 7, "state_dtype": kind} | changes))


def widened(shard: Shard) -> Shard:
    """The same shard with fp32 states."""
    twin = copy.copy(shard)
    for name, value in vars(shard).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.clone())
    for name, value in shard.wide_states().items():
        setattr(twin, name, value.clone())
    twin.scales = []
    return twin


def assert_stored(shard: Shard, wide: Shard) -> None:
    """Every state of ``shard`` is that of ``wide``, which has made the same step, as the twin would store it."""
    for row, (start, stop, _, param, param_start) in enumerate(shard.segments.tolist()):
        if not shard.present[row]:
            continue
        elements = torch.arange(param_start, param_start + stop - start)
        words = stored.random_bits(int(shard.steps[row]), param, elements)
        for place, spec in enumerate(shard.kept):
            got, exact = getattr(shard, spec.key)[start:stop], getattr(wide, spec.key)[start:stop]
            if got.dtype is torch.bfloat16:
                half = (words & 0xFFFF) if place == 0 else words >> 16
                assert same_bits(got, stored.stochastic_bf16(exact, half)), (row, spec.key)
            else:
                codes, scales = stored.encode(exact, spec.signed)
                blocks = slice(start // stored.BLOCK, -(-stop // stored.BLOCK))
                assert same_bits(shard.scales[place][blocks], scales), (row, spec.key)
                assert same_bits(got, codes), (row, spec.key)


def assert_one_step(shard: Shard) -> None:
    wide = widened(shard)
    shard.update(grad_scale=0.5)
    wide.update(grad_scale=0.5)
    assert same_bits(shard.param, wide.param)
    assert shard.master is None or (wide.master is not None and same_bits(shard.master, wide.master))
    assert_stored(shard, wide)


@pytest.mark.parametrize(("rule", "config"), EVERY_CONFIG, ids=CONFIG_IDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_is_that_of_fp32_moments_stored_by_the_twin(
    kind: torch.dtype, rule: Rule, config: dict[str, Any]
) -> None:
    for step in (0, 7):
        assert_one_step(make_shard(kind, rule=rule, config=config, step=step))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dtype", "master"), PARAMS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@each_rule
def test_with_every_dtype_and_master(rule: Rule, kind: torch.dtype, dtype: Any, master: Any, grad_dtype: Any) -> None:
    assert_one_step(make_shard(kind, dtype=dtype, master_kind=master, grad_dtype=grad_dtype, rule=rule))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_group_without_momentum_leaves_a_buffer_alone(kind: torch.dtype) -> None:
    shard = make_shard(kind, rule=SGD)
    before = [values.clone() for values in (shard.momentum_buffer, shard.steps, *shard.scales)]
    wide = widened(shard)
    for each in (shard, wide):
        each.update(options_table(SGD, momentum=0.0))
    assert same_bits(shard.param, wide.param)
    assert all(
        same_bits(a, b) for a, b in zip(before, (shard.momentum_buffer, shard.steps, *shard.scales), strict=True)
    )


def test_every_code_decodes_as_the_map_says() -> None:
    shard = make_shard(torch.uint8)
    shard.exp_avg.copy_(torch.arange(256, dtype=torch.uint8).repeat(shard.numel // 256))
    shard.exp_avg_sq.copy_(shard.exp_avg.flip(0))
    assert_one_step(shard)


def test_the_map_is_the_one_that_others_use() -> None:
    """As bitsandbytes and torchao build it, in fp32: the same up to its roundings."""
    for signed in (True, False):
        known = []
        for decade in range(7):
            borders = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
            means = 10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2
            known += [*means.tolist(), *([-x for x in means.tolist()] if signed else [])]
        expected = torch.tensor(sorted([*known, 0.0, 1.0]))
        torch.testing.assert_close(stored.dynamic_map(signed).sort().values, expected, rtol=1e-6, atol=0)


def results(kind: torch.dtype) -> list[Tensor]:
    segments, numel = block_segments(40_000, 5000, 30_001)
    found = []
    for rule, config in VARIANTS:
        own: dict[str, Any] = {"segments": segments, "state_dtype": kind, "rule": rule, "config": config}
        shard = Shard(numel, torch.bfloat16, master_kind="remainder", **own)
        for _ in range(2):
            shard.update()
        found += shard.tensors()
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_threads_and_instruction_sets_change_no_bit(kind: torch.dtype) -> None:
    threads = torch.get_num_threads()
    expected = results(kind)
    try:
        for isa in _C.supported_isas():
            for count in (1, 2, 5):
                _C.select_isa(isa)
                torch.set_num_threads(count)
                assert all(same_bits(a, b) for a, b in zip(results(kind), expected, strict=True)), (isa, count)
    finally:
        _C.select_isa("")
        torch.set_num_threads(threads)


@each_rule
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_parameter_cut_between_shards_has_the_bits_of_the_whole(kind: torch.dtype, rule: Rule) -> None:
    numel, cut = 20 * 256 + 100, 7 * 256
    whole = Shard(21 * 256, segments=torch.tensor([[0, numel, 0, 11, 0]]), step=3, state_dtype=kind, rule=rule)
    parts = []
    for start, stop in ((0, cut), (cut, whole.numel)):
        part = copy.copy(whole)
        for name in ("param", "grad", *whole.states):
            setattr(part, name, getattr(whole, name)[start:stop].clone())
        part.scales = [scales[start // 256 : stop // 256].clone() for scales in whole.scales]
        part.segments = torch.tensor([[0, min(stop, numel) - start, 0, 11, start]])
        part.steps = whole.steps.clone()
        part.update()
        parts.append(part)
    whole.update()
    for name in ("param", *whole.states):
        assert same_bits(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name
    for place, scales in enumerate(whole.scales):
        assert same_bits(scales, torch.cat([part.scales[place] for part in parts]))


@each_rule
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_and_infinity_are_seen_and_stay_in_their_block(kind: torch.dtype, value: float, rule: Rule) -> None:
    shard = Shard(1024, step=2, state_dtype=kind, rule=rule)
    shard.grad[300] = value
    for _ in range(2):
        shard.update()
    reached = torch.zeros(1024, dtype=torch.bool)
    if kind is torch.uint8:
        reached[256:512] = True
    else:
        reached[300] = True
    # Lion steps by the sign of an infinity. In 8 bits it becomes NaN before the second step.
    shown = reached & (rule.name != "lion" or kind is torch.uint8 or value != value)
    assert torch.equal(~shard.param.isfinite(), shown)
    for name, moment in shard.wide_states().items():
        assert torch.equal(~moment.isfinite(), reached), name


@each_rule
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zero_stays_zero(kind: torch.dtype, rule: Rule) -> None:
    shard = Shard(1024, state_dtype=kind, rule=rule)
    shard.grad.zero_()
    for _ in range(3):
        shard.update(options_table(rule, **({"weight_decay": 0.0} if rule is SGD else {})))
    assert not any(values.any() for values in shard.states.values())
    assert all(not scales.any() for scales in shard.scales)


def test_the_block_s_largest_value_is_exact_and_nothing_shrinks() -> None:
    """With g = m the moment should stay as it is: coding a block again and again must not wear it away."""
    shard = Shard(4096, step=5, state_dtype=torch.uint8)
    codes, scales = stored.encode(torch.randn(4096, generator=torch.Generator().manual_seed(0)), signed=True)
    shard.exp_avg.copy_(codes)
    shard.scales[0].copy_(scales)
    shard.grad = shard.wide_states()[stored.EXP_AVG].clone()
    assert (scales < 0).any()
    for _ in range(50):
        shard.update(options_table(lr=0.0))
    assert same_bits(shard.exp_avg, codes)
    assert same_bits(shard.scales[0], scales)


def test_the_maximum_in_bf16_is_never_below_what_it_is_the_maximum_of() -> None:
    shard = Shard(10_000, config={"amsgrad": True}, state_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        shard.grad.normal_(generator=generator)
        shard.update()
        assert (shard.max_exp_avg_sq >= shard.exp_avg_sq).all()


@each_rule
def test_absent_segments_and_padding_are_left_alone(rule: Rule) -> None:
    for kind in KINDS:
        shard = make_shard(kind, rule=rule)
        shard.present[[0, 2]] = 0
        before = [tensor.clone() for tensor in shard.tensors()]
        shard.update()
        kept = torch.ones(shard.numel, dtype=torch.bool)
        for row in (1, 3, 4):
            kept[shard.segments[row, 0] : shard.segments[row, 1]] = False
        for old, new in zip(before, shard.tensors(), strict=True):
            if new is not shard.steps:
                mask = kept if len(new) == shard.numel else kept.view(-1, 256).all(dim=1)
                assert same_bits(old[mask], new[mask])
                assert not torch.equal(old[~mask], new[~mask])


def test_a_moment_smaller_than_bf16_can_add_is_not_lost() -> None:
    """What stochastic rounding is for: to nearest, a share of 0.0001 of the new square would be rounded away."""
    shard = Shard(100_000, state_dtype=torch.bfloat16, step=10**6)
    shard.grad.fill_(1.1**0.5)  # exp_avg_sq would go from 1 towards 1.1
    shard.exp_avg_sq.fill_(1.0)
    for _ in range(100):
        shard.update(options_table(lr=0.0, betas=(0.9, 0.9999)))
    expected = 1.1 - 0.1 * 0.9999**100
    assert abs(float(shard.exp_avg_sq.double().mean()) - expected) < 0.02 * (expected - 1)
