"""Training steps on one device: the CPU's bits where nothing but zerox computes, torch's numbers where it does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import train_scales
from tests.gpu.models import gpt_batch, make_gpt
from tests.optimizer.models import backward, batch, make_model
from tests.optimizer.test_parity import CONFIGS, compare_each_step
from tests.tolerances import DEVICE_LOSS_RTOL
from zerox import FusedShardedAdam

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, whole gradients": {"stage": 1},
    "fp32, amsgrad": {"amsgrad": True, "clip": None},
    "fp32, several backwards": {"accumulate": 3},
    "fp32, one bucket": {"layers_in_bucket": 100.0},
    "fp32, bf16 on the wire": {"reduce_dtype": torch.bfloat16},
    "bf16 and remainder": {"dtype": torch.bfloat16},
    "bf16 and remainder, fp32 on the wire": {"dtype": torch.bfloat16, "reduce_dtype": torch.float32, "accumulate": 2},
    "bf16 and remainder, fp32 on the wire, whole gradients": {
        "dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "stage": 1,
    },
    "bf16 and fp32": {"dtype": torch.bfloat16, "master_weights": "fp32"},
    "bf16 alone": {"dtype": torch.bfloat16, "master_weights": None},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_gives_the_cpu_s_bits(device: torch.device, options: dict[str, Any]) -> None:
    params, state, norms = train_scales(0, device.type, **options)
    expected, expected_state, expected_norms = train_scales(0, "cpu", **options)
    assert all(same_bits(a, b) for a, b in zip(params, expected, strict=True))
    assert all(same_bits(a, b) for a, b in zip(state, expected_state, strict=True))
    assert norms == expected_norms


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_step_is_within_the_bound_of_torch_on_the_same_device(
    device: torch.device, dtype: torch.dtype, stage: int, name: str
) -> None:
    compare_each_step(0, 1, dtype, stage, name, device.type)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_may_leave_the_device_with_its_gradients_and_come_back(device: torch.device, stage: int) -> None:
    """As frameworks move it to the CPU at a training's end, and save after that."""
    model = make_model().to(device)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    for step in range(2):
        backward(model, batch(0, step).to(device))
        optimizer.step()
    model.to(*(["cpu"] if device.type == "cuda" else [torch.float64]))
    for param in model.parameters():
        assert param.grad is None or (param.grad.device, param.grad.dtype) == (param.device, param.dtype)
    state = optimizer.full_state_dict()["state"]
    assert any(each["exp_avg"].any() for each in state.values())
    with pytest.raises(RuntimeError, match=r"but was .* when the optimizer was built"):
        optimizer.step()
    model.to(device, torch.float32)
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    backward(model, batch(0, 2).to(device))
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))


def losses_of_the_demo(device: torch.device, seed: int, stage: int) -> list[float]:
    model = make_gpt(device, seed)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=3e-3, stage=stage)
    losses = []
    for step in range(20):
        tokens, targets = (each.to(device) for each in gpt_batch(seed, step))
        loss = model(tokens, targets)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 2])
def test_the_demo_learns_as_on_the_cpu(device: torch.device, seed: int, stage: int) -> None:
    losses = losses_of_the_demo(device, seed, stage)
    assert losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx(losses_of_the_demo(torch.device("cpu"), seed, stage), rel=DEVICE_LOSS_RTOL)


def test_fp16_autocast_trains_as_torch_and_skips_the_step_that_overflows(device: torch.device) -> None:
    """fp32 parameters in stage 1 with torch's scaler, explicit unscaling and torch's own clipping."""
    ours_model, theirs_model = make_model().to(device), make_model().to(device)
    ours = FusedShardedAdam(ours_model.parameters(), lr=1e-2, eps=1e-3, stage=1, bucket_cap_mb=0.05)
    theirs = torch.optim.AdamW(theirs_model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    scales: list[list[float]] = []
    for model, optimizer in ((ours_model, ours), (theirs_model, theirs)):
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)
        scales.append([])
        for step in range(6):
            before = [p.detach().clone() for p in model.parameters()]
            with torch.autocast(device.type, dtype=torch.float16):
                loss = model(batch(0, step).to(device)).float().square().mean()
            scaler.scale(loss * math.inf if step == 1 else loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
            same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
            assert all(same) == (step == 1)
    assert scales[0] == scales[1] == [1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]
    assert {int(state["step"]) for state in ours.state.values()} <= {0, 5}
    for p, q in zip(ours_model.parameters(), theirs_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_parameters_train_in_both_stages_alike(device: torch.device, dtype: torch.dtype) -> None:
    """Through matrix products, from the same start and batches."""
    results = []
    for stage in (1, 2):
        model = make_model(dtype).to(device)
        optimizer = FusedShardedAdam(model.parameters(), lr=1e-3, stage=stage, bucket_cap_mb=0.05)
        for step in range(5):
            backward(model, batch(0, step, dtype=dtype).to(device))
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(same_bits(p, q) for p, q in zip(*results, strict=True))
