"""Step by step against torch.optim, or Lion's formula, from identical state and the group's mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.bucket_manager.rig import Awkward, same_bits
from tests.optimizer.masters import exact_values, parts_of, rounded
from tests.optimizer.models import (
    KINDS,
    backward,
    batch,
    make_model,
    mean_over_ranks,
    memory_order,
    watch_gradients,
)
from tests.ranks import run_ranks
from tests.thinned import thinned
from tests.tolerances import CUDA_MOMENT_ULPS, MOMENT_ULPS, assert_one_step_bound
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD
from zerox.engine import Engine
from zerox.rules import reference
from zerox.rules.reference import LionState

CLASSES: dict[str, Callable[..., Engine]] = {
    "adam": FusedShardedAdam,
    "sgd": FusedShardedSGD,
    "lion": FusedShardedLion,
}
CONFIGS: dict[str, dict[str, Any]] = {  # "rule": of which class
    "adamw": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "l2": {"decoupled_weight_decay": False, "weight_decay": 0.1},
    "fast betas": {"betas": (0.4, 0.3), "eps": 0.1},
    "l2, maximize, amsgrad": {
        "decoupled_weight_decay": False,
        "weight_decay": 0.1,
        "maximize": True,
        "amsgrad": True,
    },
    "tensor lr and betas": {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.85), torch.tensor(0.97))},
    "sgd": {"rule": "sgd"},
    "sgd, momentum, dampening, l2": {"rule": "sgd", "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1},
    "sgd, nesterov, maximize": {"rule": "sgd", "momentum": 0.8, "nesterov": True, "maximize": True},
    "lion": {"rule": "lion"},
    "lion, decay, maximize": {"rule": "lion", "betas": (0.8, 0.95), "weight_decay": 0.3, "maximize": True},
}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def torch_step(values: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """One step of torch.optim with foreach=False on copies; returns the parameter and its state."""
    if "rule" in config:
        own = {key: value for key, value in config.items() if key != "rule"}
        return OTHER_STEPS[config["rule"]](values, grad, state, {"lr": 1e-2, **own})
    kind = torch.optim.AdamW if config.get("decoupled_weight_decay", True) else torch.optim.Adam
    options = {key: value for key, value in config.items() if key != "decoupled_weight_decay"}
    options["lr"] = float(options.get("lr", 1e-2))  # a tensor counts as the number it is, whatever its precision
    options["betas"] = tuple(float(beta) for beta in options.get("betas", (0.9, 0.999)))
    leaf = torch.nn.Parameter(values.clone())
    leaf.grad = grad.clone()
    torchs = kind([leaf], foreach=False, **options)
    moments = {key: value.clone() for key, value in state.items() if key in MOMENTS}
    torchs.state[leaf] = {"step": state["step"].float().cpu(), **moments}
    torchs.step()
    return leaf.detach(), torchs.state[leaf]


def sgd_step(values: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    leaf = torch.nn.Parameter(values.clone())
    leaf.grad = grad.clone()
    torchs = torch.optim.SGD([leaf], foreach=False, **config)
    if int(state["step"]) > 0:
        torchs.state[leaf] = {"momentum_buffer": state["momentum_buffer"].clone()}
    torchs.step()
    return leaf.detach(), torchs.state[leaf]


def lion_step(values: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    after = LionState(values.clone(), state["exp_avg"].clone())
    reference.lion_step(after, grad, **config)
    return after.param, {"exp_avg": after.exp_avg}


def muon_step(values: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """Of a whole matrix, whose state is 1-D."""
    leaf = torch.nn.Parameter(values.clone())
    leaf.grad = grad.clone()
    torchs = torch.optim.Muon([leaf], **config)
    torchs.state[leaf] = {"momentum_buffer": state["momentum_buffer"].view(values.shape).clone()}
    torchs.step()
    return leaf.detach(), {"momentum_buffer": torchs.state[leaf]["momentum_buffer"].view(-1)}


OTHER_STEPS = {"sgd": sgd_step, "lion": lion_step, "muon": muon_step}


def make_awkward(dtype: torch.dtype) -> tuple[nn.Module, Callable[[int, int], None]]:
    """Tied, used twice, without dimensions, empty, transposed, channels-last, sometimes and never used."""
    model = Awkward(dtype)

    def run(rank: int, step: int) -> None:
        tokens = torch.randint(0, 12, (15,), generator=torch.Generator().manual_seed(100 * rank + step))
        model(tokens, extra=step == 1 and rank == 0).backward()

    return model, run


def make_mixed(dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, Callable[[int, int], None]]:
    model = make_model(dtype).to(device)

    def run(rank: int, step: int) -> None:
        # The second batch takes the branch on rank 0 only: absent elsewhere counts as zero.
        backward(model, batch(rank, step, dtype=dtype).to(device), branch=step == 1 and rank == 0)

    return model, run


def compare_each_step(
    rank: int, world_size: int, dtype: torch.dtype, stage: int, name: str, device: str = "cpu"
) -> None:
    model, run = make_mixed(dtype, device)
    compare_steps(rank, world_size, model, run, stage, CONFIGS[name], {}, device)


def compare_steps(
    rank: int,
    world_size: int,
    model: nn.Module,
    run: Callable[[int, int], None],
    stage: int,
    config: dict[str, Any],
    options: dict[str, Any],
    device: str = "cpu",
) -> None:
    """``config``: options that torch.optim has too; ``options``: the others."""
    own = {"lr": 1e-2, **{key: value for key, value in config.items() if key != "rule"}}
    make = CLASSES[config.get("rule", "adam")]
    optimizer = make(model.named_parameters(), stage=stage, bucket_cap_mb=0.05, **own, **options)
    counts = config.get("rule") != "sgd" or "momentum" in config
    grads = watch_gradients(model)
    moment_ulps = MOMENT_ULPS if device == "cpu" else CUDA_MOMENT_ULPS
    compared = set()
    for step in range(3):
        grads.clear()
        run(rank, step)
        before = [
            (exact_values(bucket, shard), {k: v.clone() for k, v in state.items()})
            for _, _, bucket, shard, state in parts_of(optimizer)
        ]
        means = {param: mean_over_ranks(grads.get(param), param, world_size) for param in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
        for (values, old), (param, elements, bucket, shard, new) in zip(before, parts_of(optimizer), strict=True):
            mean, after = means[param], exact_values(bucket, shard)
            assert same_bits(bucket.param_shard[shard], rounded(bucket, after)), "a parameter is its master, rounded"
            assert same_bits(memory_order(param)[elements], bucket.param_shard[shard])
            if mean is None:
                assert same_bits(after, values)
                assert all(same_bits(old[key], new[key]) for key in old)
                continue
            grad = memory_order(torch.empty_like(param).copy_(mean))[elements].to(values.dtype)
            expected, moments = torch_step(values, grad, old, config)
            assert int(new["step"]) == int(old["step"]) + counts
            pairs = {k: (new[k], moments[k]) for k in new if k in MOMENTS}
            if bucket.master is None:  # the result of the arithmetic, rounded to what the parameter can hold
                values, after, expected = (t.to(param.dtype) for t in (values, after, expected))
            if values.numel():
                assert_one_step_bound(values, after, expected, pairs, moment_ulps=moment_ulps)
                compared.add(param)
    num_owned = len({param for param, *_ in parts_of(optimizer) if param.numel()})
    assert len(compared) >= num_owned - 2, "all but the unused ones"


def compare(rank: int, world_size: int, make: Any, kind: str, stage: int, config: str) -> None:
    dtype, options = KINDS[kind]
    options = dict(options)
    amsgrad = {"amsgrad": options.pop("amsgrad")} if "amsgrad" in options else {}
    compare_steps(rank, world_size, *make(dtype), stage, {**CONFIGS[config], **amsgrad}, options)


# What ranks do does not depend on a rule's options: each in float32 on three, and in float64 on one.
FEW_CONFIGS = ("l2, maximize, amsgrad", "sgd, momentum, dampening, l2", "lion, decay, maximize")
OVER = [(1, "fp32"), (1, "fp64"), (3, "fp32"), (3, "fp64")]


@pytest.mark.parametrize(("config", "over"), thinned(CONFIGS, FEW_CONFIGS, OVER, OVER[1:3]), ids=str)
def test_each_step_is_within_the_bound_of_torch(over: tuple[int, str], config: str) -> None:
    world_size, kind = over
    for stage in (1, 2):
        run_ranks(compare, world_size, make_mixed, kind, stage, config)


@pytest.mark.parametrize("kind", [kind for kind, (_, options) in KINDS.items() if "state_dtype" not in options])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_step_of_awkward_parameters_of_every_kind_is_within_the_bound(world_size: int, kind: str) -> None:
    """16-bit parameters: of their masters, where torch has fp32 parameters and the same 16-bit gradients."""
    for stage in (1, 2):
        run_ranks(compare, world_size, make_awkward, kind, stage, "adamw")
    run_ranks(compare, world_size, make_mixed, kind, 2, "l2, maximize, amsgrad")


def long_run(rank: int, world_size: int, stage: int) -> float:
    model, twin = make_model(), make_model()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-3, eps=1e-6, stage=stage)
    torchs = torch.optim.AdamW(twin.parameters(), lr=1e-3, eps=1e-6, foreach=False)
    for step in range(20):
        backward(model, batch(rank, step))
        backward(twin, batch(rank, step))
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        optimizer.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for each in (optimizer, torchs):
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_twenty_steps_stay_beside_torch(world_size: int, stage: int) -> None:
    assert max(run_ranks(long_run, world_size, stage)) < 1e-5
