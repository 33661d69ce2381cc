"""Options to update with, and one step of the kernel beside the rule in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.shards import Shard, options_table
from tests.tolerances import FP64_REFERENCE_EPSILONS
from zerox.rules.reference import AdamState, adam_step

CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "no decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "l2": {"decoupled": False},
    "l2 amsgrad maximize": {"decoupled": False, "amsgrad": True, "maximize": True},
    "lerp from the gradient": {"betas": (0.3, 0.2)},
    "no memory": {"betas": (0.0, 0.0)},
    "large eps": {"eps": 1.0},
    "no eps": {"eps": 0.0},
    "lr 0": {"lr": 0.0},
    "large lr": {"lr": 10.0},
}
MASTERS = [
    (torch.bfloat16, "remainder"),
    (torch.bfloat16, "fp32"),
    (torch.float16, "fp32"),
    (torch.bfloat16, None),
    (torch.float16, None),
]


def _cancelled(state: AdamState, shard: Shard, before: Tensor, options: dict[str, Any]) -> Tensor:
    """How large the update would be if what was added to the moments had not cancelled: roundings are as large as that.

    ``state`` is the rule's after the step. A moment's relative error is in its terms before addition, and the update is
    the quotient of both.
    """
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    l2 = 0.0 if options.get("decoupled", True) else options["weight_decay"]
    grad = shard.grad.double().cpu()
    grad_terms = grad.abs() + l2 * before.abs()
    second = state.exp_avg_sq if state.max_exp_avg_sq is None else state.max_exp_avg_sq
    first_terms = state.exp_avg.abs() + 2 * (1 - beta1) * grad_terms  # |beta1 m + x| + 2 |x| >= |beta1 m| + |x|
    second_terms = 1 + (1 - beta2) * grad_terms.square() / second.clamp(min=torch.finfo(torch.float64).tiny)
    denom = second.sqrt() / (1 - beta2**state.step) ** 0.5 + options.get("eps", 1e-8)
    return options["lr"] / (1 - beta1**state.step) * first_terms / denom * second_terms


def assert_one_step_is_the_rule(shard: Shard, config: dict[str, Any]) -> None:
    """Makes one step with the options ``config``, on the shard's device, and holds it against the rule in float64."""
    dtype = shard.dtype
    before = shard.exact().double().cpu()
    third = None if shard.max_exp_avg_sq is None else shard.max_exp_avg_sq.double().cpu()
    state = AdamState(
        before.clone(), shard.exp_avg.double().cpu(), shard.exp_avg_sq.double().cpu(), third, step=shard.step
    )
    options = {"lr": 1e-2, "weight_decay": 0.1, **config}
    rule = {key: value for key, value in options.items() if key not in ("amsgrad", "decoupled")}
    adam_step(state, shard.grad.double().cpu(), decoupled_weight_decay=config.get("decoupled", True), **rule)
    shard.adam(options_table(**config).to(shard.param.device))
    epsilon = torch.finfo(torch.float32).eps
    size = before.abs() + (state.param - before).abs() + _cancelled(state, shard, before, options)
    error = (shard.exact().double().cpu() - state.param).abs()
    if shard.master is None and dtype is not torch.float32:
        error = (error - state.param.abs() * torch.finfo(dtype).eps).clamp(min=0)  # its last rounding
        size = size + torch.finfo(dtype).smallest_normal / epsilon
    assert (error / size).max() <= FP64_REFERENCE_EPSILONS * epsilon
    moment_error = (shard.exp_avg.double().cpu() - state.exp_avg).abs().max()
    assert moment_error <= 4 * epsilon * (1 + state.exp_avg.abs().max())
