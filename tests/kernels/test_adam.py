"""The fused update against torch.optim and against the rule in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rule import CONFIGS, MASTERS, assert_one_step_is_the_rule
from tests.kernels.shards import DTYPES, Shard, moment_dtype, options_table, same_bits, segments_of
from tests.tolerances import assert_one_step_bound


def torch_step(shard: Shard, config: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """What torch.optim makes of the shard, in its own single-tensor path."""
    options = {"lr": 1e-2, "weight_decay": 0.1, **config}
    kind = torch.optim.AdamW if options.pop("decoupled", True) else torch.optim.Adam
    leaf = torch.nn.Parameter(shard.param.clone())
    leaf.grad = shard.grad.clone()
    optimizer = kind([leaf], foreach=False, **options)
    state = {"step": torch.tensor(float(shard.step)), "exp_avg": shard.exp_avg.clone()}
    state["exp_avg_sq"] = shard.exp_avg_sq.clone()
    if shard.max_exp_avg_sq is not None:
        state["max_exp_avg_sq"] = shard.max_exp_avg_sq.clone()
    optimizer.state[leaf] = state
    optimizer.step()
    return leaf.detach(), state


@pytest.mark.parametrize("grad_size", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("step", [0, 1, 1000, 10**6])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_is_within_the_bound_of_torch(dtype: torch.dtype, config: Any, step: int, grad_size: float) -> None:
    shard = Shard(10_007, dtype, amsgrad=config.get("amsgrad", False), step=step, grad_size=grad_size)
    before = shard.param.clone()
    expected, state = torch_step(shard, config)
    shard.adam(options_table(**config))
    moments = {"exp_avg": (shard.exp_avg, state["exp_avg"]), "exp_avg_sq": (shard.exp_avg_sq, state["exp_avg_sq"])}
    if shard.max_exp_avg_sq is not None:
        moments["max_exp_avg_sq"] = (shard.max_exp_avg_sq, state["max_exp_avg_sq"])
    options = {"lr": 1e-2, "weight_decay": 0.1, **config}
    decay = 1.0 - options["lr"] * options["weight_decay"] if config.get("decoupled", True) else 1.0
    assert_one_step_bound(before, shard.param, expected, moments, decay)
    assert shard.steps.tolist() == [step + 1]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, None), *MASTERS], ids=str)
def test_one_step_is_the_rule_in_float64_up_to_fp32_arithmetic(
    dtype: torch.dtype, master: str | None, config: dict[str, Any], grad_dtype: torch.dtype
) -> None:
    shard = Shard(5_003, dtype, grad_dtype, master, config.get("amsgrad", False), step=7)
    assert_one_step_is_the_rule(shard, config)


@pytest.mark.parametrize(("dtype", "master"), [pair for pair in MASTERS if pair[1]], ids=str)
def test_a_16_bit_parameter_is_its_master_rounded(dtype: torch.dtype, master: str) -> None:
    shard = Shard(100_003, dtype, master_kind=master)
    for _ in range(3):
        shard.adam(options_table())
        exact = shard.exact()
        if master == "fp32":
            assert torch.equal(shard.param, exact.to(dtype)), "nearest, ties to even"
        else:
            distance = (shard.param.double() - exact.double()).abs()
            away = torch.nextafter(shard.param, torch.zeros_like(shard.param))  # the neighbour towards zero
            assert (distance <= (away.double() - exact.double()).abs()).all(), "nearest, ties away from zero"


def test_a_remainder_never_changes_the_exact_value_when_nothing_is_updated() -> None:
    shard = Shard(100_003, torch.bfloat16, master_kind="remainder")
    before = shard.exact()
    shard.adam(options_table(lr=0.0, weight_decay=0.0))
    assert same_bits(shard.exact(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_value_written_into_a_parameter_replaces_its_fp32_master(dtype: torch.dtype) -> None:
    shard = Shard(1000, dtype, master_kind="fp32")
    before = shard.exact().clone()
    shard.param[100:300] = 3.5
    shard.adam(options_table(lr=0.0))
    assert torch.equal(shard.exact()[100:300], torch.full((200,), 3.5))
    assert same_bits(shard.exact()[:100], before[:100])
    assert same_bits(shard.exact()[300:], before[300:])


def test_any_value_written_beside_a_remainder_is_where_the_next_step_starts() -> None:
    shard = Shard(5 * 65536, torch.bfloat16, master_kind="remainder")
    assert shard.master is not None
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    shard.param.copy_(patterns.view(torch.bfloat16).repeat(5))
    shard.master.copy_(torch.tensor([-32768, -1, 0, 1, 32767], dtype=torch.int16).repeat_interleave(65536))
    written = shard.param.clone()
    shard.grad.zero_()
    shard.adam(options_table(lr=0.0, weight_decay=0.0, eps=1.0))
    assert torch.equal(shard.param.isnan(), written.isnan()), "zero beside a negative remainder must not become NaN"
    assert torch.equal(shard.param.nan_to_num(nan=7.0), written.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_segments_are_left_alone(dtype: torch.dtype) -> None:
    segments = segments_of(300, 17, 1, 5000, gap=3)
    shard = Shard(int(segments[-1, 1]) + 8, dtype, segments=segments, step=4)
    shard.present[:] = torch.tensor([1, 0, 0, 1])
    before = [t.clone() for t in shard.tensors()]
    shard.adam(options_table())
    assert shard.steps.tolist() == [5, 4, 4, 5]
    kept = torch.ones(shard.numel, dtype=torch.bool)
    for row in (0, 3):
        kept[segments[row, 0] : segments[row, 1]] = False
    for old, new in zip(before[:-1], shard.tensors()[:-1], strict=True):
        assert same_bits(old[kept], new[kept]), "absent segments and padding"
        assert not torch.equal(old[~kept], new[~kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_scale_multiplies_the_gradient_first(dtype: torch.dtype) -> None:
    scaled, by_hand = Shard(1000, dtype), Shard(1000, dtype)
    by_hand.grad = by_hand.grad * torch.tensor(0.37, dtype=torch.float32).to(dtype)
    scaled.adam(options_table(), grad_scale=float(torch.tensor(0.37, dtype=torch.float32)))
    by_hand.adam(options_table())
    for a, b in zip(scaled.tensors(), by_hand.tensors(), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("between", [(), (0,)], ids=["", "an empty one between"])
def test_each_segment_uses_its_own_options_and_step_count(between: tuple[int, ...]) -> None:
    # Neighbours differ in the step alone, then in the options alone: what is folded for one must not serve the other.
    # An empty one is like the one behind it.
    segments = segments_of(500, *between, 700, *between, 300)
    n = len(between)
    segments[:, 2] = torch.tensor([0, *[0] * n, 0, *[1] * n, 1])
    options = torch.cat([options_table(lr=0.5), options_table(betas=(0.5, 0.5), decoupled=False)])
    together = Shard(1500, segments=segments)
    together.steps[:] = torch.tensor([5, *[9] * n, 9, *[9] * n, 9])
    parts = []
    for start, stop, row, *_ in segments.tolist():
        part = Shard(1500)
        for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
            setattr(part, name, getattr(together, name)[start:stop].clone())
        part.segments = segments_of(stop - start)
        part.steps = together.steps[len(parts) : len(parts) + 1].clone()
        part.adam(options[row : row + 1])
        parts.append(part)
    together.adam(options)
    assert same_bits(together.param, torch.cat([part.param for part in parts]))
    assert same_bits(together.exp_avg_sq, torch.cat([part.exp_avg_sq for part in parts]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_propagate(value: float) -> None:
    for dtype, master in [(torch.float32, None), *MASTERS]:
        shard = Shard(100, dtype, master_kind=master)
        shard.grad[10] = value
        shard.adam(options_table())
        assert torch.isnan(shard.param[10])
        assert torch.isnan(shard.exact()[10])
        assert torch.isfinite(shard.param[:10]).all()
        assert torch.isfinite(shard.param[11:]).all()


def test_fp64_parameters_take_gradients_of_any_dtype() -> None:
    for grad_dtype in DTYPES:
        narrow = Shard(1001, torch.float64, grad_dtype)
        wide = Shard(1001, torch.float64)
        wide.grad = narrow.grad.double()
        narrow.adam(options_table())
        wide.adam(options_table())
        assert same_bits(narrow.param, wide.param)
        assert narrow.exp_avg.dtype == moment_dtype(torch.float64)
