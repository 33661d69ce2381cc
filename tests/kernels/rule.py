"""Options to update with, and one step of the kernel beside the rule in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.shards import RULES, Shard, group_of
from tests.tolerances import FP64_REFERENCE_EPSILONS
from zerox.rules.adam import ADAM
from zerox.rules.lion import LION
from zerox.rules.reference import AdamState, LionState, SgdState, adam_step, lion_step, sgd_step
from zerox.rules.sgd import SGD

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "adam": {
        "adamw": {},
        "no decay": {"weight_decay": 0.0},
        "amsgrad": {"amsgrad": True},
        "maximize": {"maximize": True},
        "l2": {"decoupled_weight_decay": False},
        "l2 amsgrad maximize": {"decoupled_weight_decay": False, "amsgrad": True, "maximize": True},
        "lerp from the gradient": {"betas": (0.3, 0.2)},
        "no memory": {"betas": (0.0, 0.0)},
        "large eps": {"eps": 1.0},
        "no eps": {"eps": 0.0},
        "lr 0": {"lr": 0.0},
        "large lr": {"lr": 10.0},
    },
    "sgd": {
        "momentum": {},
        "no momentum": {"momentum": 0.0},
        "plain": {"momentum": 0.0, "weight_decay": 0.0},
        "no decay": {"weight_decay": 0.0},
        "nesterov": {"nesterov": True},
        "dampening": {"dampening": 0.3},
        "fully damped": {"dampening": 1.0},
        "dampening without momentum": {"momentum": 0.0, "dampening": 0.5},
        "maximize": {"maximize": True},
        "nesterov maximize": {"nesterov": True, "maximize": True, "momentum": 0.5},
        "lr 0": {"lr": 0.0},
        "large lr": {"lr": 10.0},
    },
    "lion": {
        "lion": {},
        "no decay": {"weight_decay": 0.0},
        "maximize": {"maximize": True},
        "short memory": {"betas": (0.3, 0.2)},
        "no memory": {"betas": (0.0, 0.0)},
        "lr 0": {"lr": 0.0},
        "large lr": {"lr": 10.0},
    },
}
# For @pytest.mark.parametrize(("rule", "config"), ...).
EVERY_CONFIG = [(rule, config) for rule in RULES for config in CONFIGS[rule.name].values()]
CONFIG_IDS = [f"{rule}, {name}" for rule, configs in CONFIGS.items() for name in configs]
# For @pytest.mark.parametrize(("rule", "config"), ...): each rule with every number of states that it may keep.
VARIANTS = [(ADAM, {}), (ADAM, {"amsgrad": True}), (SGD, {}), (SGD, {"momentum": 0.0}), (LION, {})]
VARIANT_IDS = ["adam", "adam, amsgrad", "sgd", "sgd, no momentum", "lion"]
MASTERS = [
    (torch.bfloat16, "remainder"),
    (torch.bfloat16, "fp32"),
    (torch.float16, "fp32"),
    (torch.bfloat16, None),
    (torch.float16, None),
]


@dataclass
class Expected:
    """What one step in float64 makes of a shard.

    ``size``: how large the update would be if nothing that was added up on its way had cancelled: roundings are as
    large as that. ``unsure``: how far the update may be off beside roundings.
    """

    param: Tensor
    states: dict[str, Tensor]
    size: Tensor
    unsure: Tensor | float = 0.0


def adam_expected(shard: Shard, before: Tensor, grad: Tensor, options: dict[str, Any]) -> Expected:
    state = AdamState(before.clone(), step=shard.step, **in_float64(shard))
    adam_step(state, grad, **{key: value for key, value in options.items() if key != "amsgrad"})
    beta1, beta2 = options["betas"]
    l2 = 0.0 if options["decoupled_weight_decay"] else options["weight_decay"]
    grad_terms = grad.abs() + l2 * before.abs()
    second = state.exp_avg_sq if state.max_exp_avg_sq is None else state.max_exp_avg_sq
    # A moment's relative error is in its terms before addition, and the update is the quotient of both.
    first_terms = state.exp_avg.abs() + 2 * (1 - beta1) * grad_terms  # |beta1 m + x| + 2 |x| >= |beta1 m| + |x|
    second_terms = 1 + (1 - beta2) * grad_terms.square() / second.clamp(min=torch.finfo(torch.float64).tiny)
    denom = second.sqrt() / (1 - beta2**state.step) ** 0.5 + options["eps"]
    size = options["lr"] / (1 - beta1**state.step) * first_terms / denom * second_terms
    return Expected(state.param, {"exp_avg": state.exp_avg}, size)


def sgd_expected(shard: Shard, before: Tensor, grad: Tensor, options: dict[str, Any]) -> Expected:
    kept = in_float64(shard)
    buffer = kept.get("momentum_buffer", torch.zeros_like(before))
    state = SgdState(before.clone(), buffer.clone() if kept and shard.step > 0 else None)
    sgd_step(state, grad, **options)
    terms = grad.abs() + options["weight_decay"] * before.abs() + options["momentum"] * buffer.abs()
    size = options["lr"] * (1 + options["momentum"]) * terms
    states = {} if state.momentum_buffer is None else {"momentum_buffer": state.momentum_buffer}
    return Expected(state.param, states, size)


def lion_expected(shard: Shard, before: Tensor, grad: Tensor, options: dict[str, Any]) -> Expected:
    exp_avg = in_float64(shard)["exp_avg"]
    state = LionState(before.clone(), exp_avg.clone())
    lion_step(state, grad, **options)
    beta1, lr = options["betas"][0], options["lr"]
    average = beta1 * exp_avg + (1 - beta1) * (-grad if options["maximize"] else grad)
    terms = beta1 * exp_avg.abs() + (1 - beta1) * grad.abs()
    # Where they cancel, the average in fp32 may have another sign.
    unsure = 2 * lr * (average.abs() <= 4 * torch.finfo(torch.float32).eps * terms)
    return Expected(state.param, {"exp_avg": state.exp_avg}, torch.full_like(before, lr), unsure)


EXPECTED: dict[str, Callable[[Shard, Tensor, Tensor, dict[str, Any]], Expected]] = {
    "adam": adam_expected,
    "sgd": sgd_expected,
    "lion": lion_expected,
}


def in_float64(shard: Shard) -> dict[str, Tensor]:
    return {key: values.double().cpu().clone() for key, values in shard.wide_states().items()}


def assert_one_step_is_the_rule(shard: Shard) -> None:
    """Makes one step, on the shard's device, and holds it against the rule in float64."""
    before = shard.exact().double().cpu()
    options = group_of(shard.rule, **shard.config)
    expected = EXPECTED[shard.rule.name](shard, before, shard.grad.double().cpu(), options)
    shard.update()
    epsilon = torch.finfo(torch.float32).eps
    size = before.abs() + (expected.param - before).abs() + expected.size
    error = ((shard.exact().double().cpu() - expected.param).abs() - expected.unsure).clamp(min=0)
    if shard.master is None and shard.dtype is not torch.float32:
        error = (error - expected.param.abs() * torch.finfo(shard.dtype).eps).clamp(min=0)  # its last rounding
        size = size + torch.finfo(shard.dtype).smallest_normal / epsilon
    assert (error / size).max() <= FP64_REFERENCE_EPSILONS * epsilon
    for key, values in expected.states.items():
        state_error = (getattr(shard, key).double().cpu() - values).abs().max()
        assert state_error <= 4 * epsilon * (1 + values.abs().max()), key
