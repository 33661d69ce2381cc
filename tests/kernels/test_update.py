"""The fused update, by each rule, against torch.optim and against the rule in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rule import (
    CONFIG_IDS,
    EVERY_CONFIG,
    MASTERS,
    VARIANT_IDS,
    VARIANTS,
    assert_one_step_is_the_rule,
)
from tests.kernels.shards import DTYPES, RULES, Shard, group_of, moment_dtype, options_table, same_bits, segments_of
from tests.tolerances import assert_one_step_bound
from zerox.rules.adam import ADAM
from zerox.rules.rule import Rule
from zerox.rules.sgd import SGD

each_variant = pytest.mark.parametrize(("rule", "config"), VARIANTS, ids=VARIANT_IDS)
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
# Those that torch has, too.
TORCH = [(case, name) for case, name in zip(EVERY_CONFIG, CONFIG_IDS, strict=True) if case[0] in (ADAM, SGD)]


def torch_step(shard: Shard) -> tuple[Tensor, dict[str, Tensor]]:
    """What torch.optim makes of the shard, in its own single-tensor path."""
    group = group_of(shard.rule, **shard.config)
    kind = getattr(torch.optim, shard.rule.torch_class(group))
    group.pop("decoupled_weight_decay", None)
    leaf = torch.nn.Parameter(shard.param.clone())
    leaf.grad = shard.grad.clone()
    optimizer = kind([leaf], foreach=False, **group)
    state = {key: values.clone() for key, values in shard.states.items()} if shard.step or shard.rule is ADAM else {}
    if shard.rule is ADAM:
        state["step"] = torch.tensor(float(shard.step))
    if state:
        optimizer.state[leaf] = state
    optimizer.step()
    return leaf.detach(), {key: optimizer.state[leaf][key] for key in shard.states}


@pytest.mark.parametrize("grad_size", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("step", [0, 1, 1000, 10**6])
@pytest.mark.parametrize(("rule", "config"), [case for case, _ in TORCH], ids=[name for _, name in TORCH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_is_within_the_bound_of_torch(
    dtype: torch.dtype, rule: Rule, config: Any, step: int, grad_size: float
) -> None:
    shard = Shard(10_007, dtype, config=config, step=step, grad_size=grad_size, rule=rule)
    before = shard.param.clone()
    expected, state = torch_step(shard)
    shard.update()
    options = group_of(rule, **config)
    decay = 1.0 - options["lr"] * options["weight_decay"] if options.get("decoupled_weight_decay") else 1.0
    assert_one_step_bound(
        before, shard.param, expected, {key: (shard.states[key], theirs) for key, theirs in state.items()}, decay
    )
    counts = rule is not SGD or options["momentum"] != 0
    assert shard.steps.tolist() == [step + counts]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch multiplies and adds apart"
)
@pytest.mark.parametrize("step", [0, 1, 1000])
@pytest.mark.parametrize(
    ("rule", "config"),
    [case for case, _ in TORCH if case[0] is SGD],
    ids=[name for (rule, _), name in TORCH if rule is SGD],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_has_torch_s_bits(dtype: torch.dtype, rule: Rule, config: Any, step: int) -> None:
    shard = Shard(16_384, dtype, config=config, step=step, rule=rule)
    expected, state = torch_step(shard)
    shard.update()
    assert same_bits(shard.param, expected)
    assert all(same_bits(shard.states[key], theirs) for key, theirs in state.items())


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "config"), EVERY_CONFIG, ids=CONFIG_IDS)
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, None), *MASTERS], ids=str)
def test_one_step_is_the_rule_in_float64_up_to_fp32_arithmetic(
    dtype: torch.dtype, master: str | None, rule: Rule, config: dict[str, Any], grad_dtype: torch.dtype
) -> None:
    for step in (0, 7):
        assert_one_step_is_the_rule(Shard(5_003, dtype, grad_dtype, master, config, step, rule=rule))


@each_rule
@pytest.mark.parametrize(("dtype", "master"), [pair for pair in MASTERS if pair[1]], ids=str)
def test_a_16_bit_parameter_is_its_master_rounded(dtype: torch.dtype, master: str, rule: Rule) -> None:
    shard = Shard(100_003, dtype, master_kind=master, rule=rule)
    for _ in range(3):
        shard.update()
        exact = shard.exact()
        if master == "fp32":
            assert torch.equal(shard.param, exact.to(dtype)), "nearest, ties to even"
        else:
            distance = (shard.param.double() - exact.double()).abs()
            away = torch.nextafter(shard.param, torch.zeros_like(shard.param))  # the neighbour towards zero
            assert (distance <= (away.double() - exact.double()).abs()).all(), "nearest, ties away from zero"


@each_rule
def test_a_remainder_never_changes_the_exact_value_when_nothing_is_updated(rule: Rule) -> None:
    shard = Shard(100_003, torch.bfloat16, master_kind="remainder", rule=rule)
    before = shard.exact()
    shard.update(options_table(rule, lr=0.0, weight_decay=0.0))
    assert same_bits(shard.exact(), before)


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_value_written_into_a_parameter_replaces_its_fp32_master(dtype: torch.dtype, rule: Rule) -> None:
    shard = Shard(1000, dtype, master_kind="fp32", rule=rule)
    before = shard.exact().clone()
    shard.param[100:300] = 3.5
    shard.update(options_table(rule, lr=0.0))
    assert torch.equal(shard.exact()[100:300], torch.full((200,), 3.5))
    assert same_bits(shard.exact()[:100], before[:100])
    assert same_bits(shard.exact()[300:], before[300:])


@each_rule
def test_any_value_written_beside_a_remainder_is_where_the_next_step_starts(rule: Rule) -> None:
    shard = Shard(5 * 65536, torch.bfloat16, master_kind="remainder", rule=rule)
    assert shard.master is not None
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    shard.param.copy_(patterns.view(torch.bfloat16).repeat(5))
    shard.master.copy_(torch.tensor([-32768, -1, 0, 1, 32767], dtype=torch.int16).repeat_interleave(65536))
    written = shard.param.clone()
    shard.grad.zero_()
    eps = {"eps": 1.0} if rule is ADAM else {}
    shard.update(options_table(rule, lr=0.0, weight_decay=0.0, **eps))
    assert torch.equal(shard.param.isnan(), written.isnan()), "zero beside a negative remainder must not become NaN"
    assert torch.equal(shard.param.nan_to_num(nan=7.0), written.nan_to_num(nan=7.0))


@each_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_segments_are_left_alone(dtype: torch.dtype, rule: Rule, config: Any) -> None:
    segments = segments_of(300, 17, 1, 5000, gap=3)
    shard = Shard(int(segments[-1, 1]) + 8, dtype, config=config, segments=segments, step=4, rule=rule)
    shard.present[:] = torch.tensor([1, 0, 0, 1])
    before = [t.clone() for t in (shard.param, *shard.states.values())]
    shard.update()
    counts = not (rule is SGD and config)
    assert shard.steps.tolist() == [4 + counts, 4, 4, 4 + counts]
    kept = torch.ones(shard.numel, dtype=torch.bool)
    for row in (0, 3):
        kept[segments[row, 0] : segments[row, 1]] = False
    for old, new in zip(before, (shard.param, *shard.states.values()), strict=True):
        assert same_bits(old[kept], new[kept]), "absent segments and padding"
        assert not torch.equal(old[~kept], new[~kept])


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_scale_multiplies_the_gradient_first(dtype: torch.dtype, rule: Rule, config: Any) -> None:
    scaled, by_hand = (Shard(1000, dtype, config=config, rule=rule) for _ in range(2))
    by_hand.grad = by_hand.grad * torch.tensor(0.37, dtype=torch.float32).to(dtype)
    scaled.update(grad_scale=float(torch.tensor(0.37, dtype=torch.float32)))
    by_hand.update()
    for a, b in zip(scaled.tensors(), by_hand.tensors(), strict=True):
        assert same_bits(a, b)


@each_rule
@pytest.mark.parametrize("between", [(), (0,)], ids=["", "an empty one between"])
def test_each_segment_uses_its_own_options_and_step_count(between: tuple[int, ...], rule: Rule) -> None:
    # Neighbours differ in the step alone, then in the options alone: what is folded for one must not serve the other.
    # An empty one is like the one behind it.
    segments = segments_of(500, *between, 700, *between, 300)
    n = len(between)
    segments[:, 2] = torch.tensor([0, *[0] * n, 0, *[1] * n, 1])
    other: dict[str, dict[str, Any]] = {
        "adam": {"betas": (0.5, 0.5), "decoupled_weight_decay": False},
        "sgd": {"momentum": 0.0},
        "lion": {"lr": 0.1},
    }
    options = torch.cat([options_table(rule, lr=0.5), options_table(rule, **other[rule.name])])
    together = Shard(1500, segments=segments, rule=rule)
    together.steps[:] = torch.tensor([0, *[9] * n, 9, *[9] * n, 9])
    parts = []
    for start, stop, row, *_ in segments.tolist():
        part = Shard(1500, rule=rule)
        for name in ("param", "grad", *part.states):
            setattr(part, name, getattr(together, name)[start:stop].clone())
        part.segments = segments_of(stop - start)
        part.steps = together.steps[len(parts) : len(parts) + 1].clone()
        part.update(options[row : row + 1])
        parts.append(part)
    together.update(options)
    for name in ("param", "steps", *together.states):
        assert same_bits(getattr(together, name), torch.cat([getattr(part, name) for part in parts])), name


@each_variant
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_seen_and_reach_no_neighbour(value: float, rule: Rule, config: Any) -> None:
    for dtype, master in [(torch.float32, None), *MASTERS]:
        shard = Shard(100, dtype, master_kind=master, config=config, rule=rule)
        shard.grad[10] = value
        shard.update()
        reached = [shard.param, shard.exact(), *shard.states.values()]
        if rule.name == "lion" and value == torch.inf:  # the sign of infinity is 1: the state alone shows it
            reached = reached[2:]
        for values in reached:
            assert torch.isnan(values[10]) if torch.isnan(torch.tensor(value)) else not torch.isfinite(values[10])
        for values in (shard.param, shard.exact(), *shard.states.values()):
            assert torch.isfinite(values[:10]).all()
            assert torch.isfinite(values[11:]).all()


@each_variant
def test_fp64_parameters_take_gradients_of_any_dtype(rule: Rule, config: Any) -> None:
    for grad_dtype in DTYPES:
        narrow = Shard(1001, torch.float64, grad_dtype, config=config, rule=rule)
        wide = Shard(1001, torch.float64, config=config, rule=rule)
        wide.grad = narrow.grad.double()
        narrow.update()
        wide.update()
        assert same_bits(narrow.param, wide.param)
        assert all(values.dtype == moment_dtype(torch.float64) for values in narrow.states.values())
