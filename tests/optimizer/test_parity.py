"""Step by step against torch.optim, from identical state and the group's mean gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optimizer.models import backward, batch, make_model, mean_over_ranks, memory_order, watch_gradients
from tests.ranks import run_ranks
from tests.tolerances import CUDA_MOMENT_ULPS, MOMENT_ULPS, assert_one_step_bound
from zerox import FusedShardedAdam

CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "l2": {"decoupled_weight_decay": False, "weight_decay": 0.1},
    "fast betas": {"betas": (0.4, 0.3), "eps": 0.1},
}


def parts_of(optimizer: FusedShardedAdam) -> list[tuple[torch.Tensor, Any, dict[str, torch.Tensor]]]:
    """Each parameter of which this rank owns something: the range of its elements, and the views of its state."""
    parts = []
    for bucket in optimizer._buckets:
        for segment, (param, state) in zip(bucket.own_segments, bucket.state_of_own(), strict=True):
            span = slice(segment.param_start, segment.param_start + segment.span.numel)
            flat = {key: value if key == "step" else value.reshape(-1) for key, value in state.items()}
            parts.append((param, span, flat))
    return parts


def torch_step(values: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """One step of torch.optim with foreach=False on copies; returns the parameter and its state."""
    kind = torch.optim.AdamW if config.get("decoupled_weight_decay", True) else torch.optim.Adam
    options = {key: value for key, value in config.items() if key != "decoupled_weight_decay"}
    leaf = torch.nn.Parameter(values.clone())
    leaf.grad = grad.clone()
    reference = kind([leaf], lr=1e-2, foreach=False, **options)
    moments = {key: value.clone() for key, value in state.items() if key != "step"}
    reference.state[leaf] = {"step": state["step"].float().cpu(), **moments}
    reference.step()
    return leaf.detach(), reference.state[leaf]


def compare_each_step(
    rank: int, world_size: int, dtype: torch.dtype, stage: int, name: str, device: str = "cpu"
) -> None:
    config = CONFIGS[name]
    model = make_model(dtype).to(device)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.05, **config)
    grads = watch_gradients(model)
    moment_ulps = MOMENT_ULPS if device == "cpu" else CUDA_MOMENT_ULPS
    compared = 0
    for step in range(3):
        grads.clear()
        # The second batch takes the branch on rank 0 only: absent elsewhere counts as zero.
        backward(model, batch(rank, step, dtype=dtype).to(device), branch=step == 1 and rank == 0)
        before = [
            (param, span, memory_order(param)[span].clone(), {k: v.clone() for k, v in state.items()})
            for param, span, state in parts_of(optimizer)
        ]
        means = {param: mean_over_ranks(grads.get(param), param, world_size) for param in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
        for (param, span, values, old), (_, _, new) in zip(before, parts_of(optimizer), strict=True):
            mean = means[param]
            after = memory_order(param)[span]
            if mean is None:
                assert torch.equal(after, values)
                assert all(torch.equal(old[key], new[key]) for key in old)
                continue
            expected, moments = torch_step(values, memory_order(mean)[span], old, config)
            assert int(new["step"]) == int(old["step"]) + 1
            pairs = {k: (new[k], moments[k]) for k in new if k != "step"}
            assert_one_step_bound(values, after, expected, pairs, moment_ulps=moment_ulps)
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_step_is_within_the_bound_of_torch(world_size: int, dtype: torch.dtype, stage: int, name: str) -> None:
    run_ranks(compare_each_step, world_size, dtype, stage, name)


def long_run(rank: int, world_size: int, stage: int) -> float:
    model, twin = make_model(), make_model()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-3, eps=1e-6, stage=stage)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3, eps=1e-6, foreach=False)
    for step in range(20):
        backward(model, batch(rank, step))
        backward(twin, batch(rank, step))
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        optimizer.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_twenty_steps_stay_beside_torch(world_size: int, stage: int) -> None:
    assert max(run_ranks(long_run, world_size, stage)) < 1e-5
