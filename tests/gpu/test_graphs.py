"""step() in a CUDA graph: captured once, replayed with what gradients, clip scale and learning rate are by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import MIB, Scales, batch_of
from zerox import FusedShardedAdam

NUMEL = 5000
STEPS = 6


def rate_at(step: int) -> float:
    return 1e-2 / (1 + step)


def backward(model: Scales, step: int, dtype: torch.dtype) -> None:
    y = model(batch_of(0, step, NUMEL, dtype).cuda()).float()
    (y * y).sum().backward()


def optimizer_of(model: Scales, dtype: torch.dtype, **options: Any) -> FusedShardedAdam:
    cap_mb = 2 * NUMEL * dtype.itemsize / MIB
    return FusedShardedAdam(model.parameters(), weight_decay=0.1, bucket_cap_mb=cap_mb, **options)


def state_of(model: Scales, optimizer: FusedShardedAdam) -> list[Tensor]:
    state = [value for each in optimizer.state.values() for _, value in sorted(each.items())]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


def eager(dtype: torch.dtype, clip: float | None) -> list[list[Tensor]]:
    """Parameters and state after each step."""
    model = Scales(numel=NUMEL).to("cuda", dtype)
    optimizer = optimizer_of(model, dtype, lr=rate_at(0))
    states = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = float(torch.tensor(rate_at(step)))  # as a float32 holds it
        backward(model, step, dtype)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model, optimizer))
    return states


def replayed(dtype: torch.dtype, clip: float | None, eager_steps: int) -> list[list[Tensor]]:
    """The same with a captured step, after some that ran as they came."""
    model = Scales(numel=NUMEL).to("cuda", dtype)
    rate = torch.tensor(rate_at(0), device="cuda")
    optimizer = optimizer_of(model, dtype, lr=rate, capturable=True)
    graph = torch.cuda.CUDAGraph()
    states = []
    for step in range(STEPS):
        rate.fill_(rate_at(step))
        optimizer.zero_grad()
        backward(model, step, dtype)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.synchronize()
        if step < eager_steps:
            optimizer.step()
        else:
            if step == eager_steps:
                with torch.cuda.graph(graph):  # runs nothing
                    optimizer.step()
            graph.replay()
        states.append(state_of(model, optimizer))
    return states


@pytest.mark.parametrize("eager_steps", [0, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_replayed_step_is_the_eager_one(
    cuda: torch.device, dtype: torch.dtype, clip: float | None, eager_steps: int
) -> None:
    expected = eager(dtype, clip)
    for step, (ours, theirs) in enumerate(zip(replayed(dtype, clip, eager_steps), expected, strict=True)):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True)), f"step {step}"


def test_step_counts_advance_with_each_replay(cuda: torch.device) -> None:
    model = Scales(numel=NUMEL).cuda()
    optimizer = optimizer_of(model, torch.float32, lr=1e-2, capturable=True)
    backward(model, 0, torch.float32)
    optimizer.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for count in range(1, 4):
        graph.replay()
        assert {int(state["step"]) for state in optimizer.state.values()} == {count}


def test_a_step_that_is_not_capturable_says_so(cuda: torch.device) -> None:
    model = Scales(numel=NUMEL).cuda()
    optimizer = optimizer_of(model, torch.float32, lr=1e-2)
    backward(model, 0, torch.float32)
    optimizer.step()
    before = state_of(model, optimizer)
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert all(same_bits(a, b) for a, b in zip(state_of(model, optimizer), before, strict=True))
    backward(model, 1, torch.float32)
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
