"""16-bit gradients that add up in float32 where they are added on the spot: inside no_sync(), and in stage 1."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.memory.grad_dtype import grad_dtype_of

NUMELS = [300_000, 70]  # one whose gradient is large enough to be sent as it lies
COUNT = 600  # ones add up to 256 in bfloat16, and stay there


def make_params(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in NUMELS]


def backward(params: list[nn.Parameter], factor: float = 1.0) -> None:
    sum((param * factor).sum() for param in params).backward()


def _norm(rank: int, world_size: int, stage: int, wire: torch.dtype | None, no_sync: bool, dtype: torch.dtype) -> float:
    """The largest element of the mean gradient after many backwards of ones."""
    params = make_params(dtype)
    optimizer = FusedShardedAdam(
        params, stage=stage, reduce_dtype=wire, accumulate_dtype=torch.float32, bucket_cap_mb=100.0
    )
    if no_sync:
        with optimizer.no_sync():
            for _ in range(COUNT - 1):
                backward(params)
            assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in params)
            assert all(torch.all(p.grad == COUNT - 1) for p in params)
    for _ in range(1 if no_sync else COUNT):
        backward(params)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in params)
    if stage == 1:
        assert all(torch.all(p.grad == COUNT) for p in params)
    return float(optimizer.clip_grad_norm_(1e9, math.inf))


# On a narrow wire what has been summed is rounded to it: 600 is a bfloat16.
CASES = [
    (1, torch.float32, False),
    (1, torch.float32, True),
    (1, None, True),
    (2, torch.float32, False),
    (2, torch.float32, True),
    (2, None, True),
]


@pytest.mark.parametrize(("stage", "wire", "no_sync"), CASES)
def test_six_hundred_ones_are_six_hundred(stage: int, wire: torch.dtype | None, no_sync: bool) -> None:
    assert run_ranks(_norm, 2, stage, wire, no_sync, torch.bfloat16) == [COUNT] * 2
    assert _norm(0, 1, stage, wire, no_sync, torch.bfloat16) == COUNT


def _train(
    rank: int, world_size: int, stage: int, wire: torch.dtype | None, accumulate: torch.dtype | None, clip: bool
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    params = make_params()
    for index, param in enumerate(params):
        param.data += torch.linspace(-1, 1 + index, param.numel())
    optimizer = FusedShardedAdam(
        params, lr=1e-2, stage=stage, reduce_dtype=wire, accumulate_dtype=accumulate, bucket_cap_mb=0.3
    )
    for _ in range(3):
        with optimizer.no_sync():
            backward(params, float(torch.randn((), generator=generator)))
        backward(params, float(torch.randn((), generator=generator)))
        if clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("wire", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_stages_give_the_same_bits(world_size: int, wire: torch.dtype | None, clip: bool) -> None:
    def train(stage: int) -> list[list[Tensor]]:
        args = (stage, wire, torch.float32, clip)
        return [_train(0, 1, *args)] if world_size == 1 else run_ranks(_train, world_size, *args)

    for first, second in zip(train(1), train(2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
def test_none_leaves_what_torch_does(stage: int) -> None:
    params = make_params()
    optimizer = FusedShardedAdam(params, stage=stage)
    with optimizer.no_sync():
        backward(params)
    assert all(p.grad is not None and p.grad.dtype is torch.bfloat16 for p in params)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_grad_dtype_that_the_user_set_is_taken_as_it_is(stage: int) -> None:
    params = make_params()
    params[1].grad_dtype = torch.float32
    optimizer = FusedShardedAdam(params, stage=stage)
    backward(params)
    assert [p.grad.dtype for p in params if p.grad is not None] == [torch.bfloat16, torch.float32]
    optimizer.step()
    del optimizer
    assert [p.grad_dtype for p in params] == [torch.bfloat16, torch.float32]


def test_wide_gradients_that_kernels_lack_are_refused() -> None:
    params = make_params()
    params[1].grad_dtype = torch.float64
    with pytest.raises(ValueError, match=r"'param 1' of torch.bfloat16 has grad_dtype torch.float64"):
        FusedShardedAdam(params)


@pytest.mark.parametrize("stage", [1, 2])
def test_it_is_given_back_at_deletion(stage: int) -> None:
    params = make_params()
    optimizer = FusedShardedAdam(params, stage=stage, accumulate_dtype=torch.float32)
    backward(params)
    del optimizer
    gc.collect()
    assert [p.grad_dtype for p in params] == [torch.bfloat16] * 2
    for param in params:
        assert (param.grad is None) if stage == 2 else (param.grad.dtype is torch.bfloat16)
    torch.optim.AdamW(params).zero_grad()
    backward(params)
    torch.optim.AdamW(params).step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_assigned_by_hand_may_have_either_dtype(dtype: torch.dtype) -> None:
    """Where the user allows any (torch itself refuses another one than grad_dtype)."""
    params = make_params()
    for param in params:
        param.grad_dtype = None
    optimizer = FusedShardedAdam(params, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param, dtype=dtype)
    optimizer.step()
    assert all(torch.all(param < 0) for param in params)


def test_a_gradient_of_before_the_constructor_is_kept() -> None:
    params = make_params()
    backward(params)
    optimizer = FusedShardedAdam(params, stage=1, accumulate_dtype=torch.float32)
    backward(params)
    assert all(torch.all(p.grad == 2) and p.grad.dtype is torch.float32 for p in params)
    optimizer.step()


def test_unfrozen_parameters_take_part() -> None:
    params = make_params()
    params[1].requires_grad_(False)
    optimizer = FusedShardedAdam(params, stage=1, accumulate_dtype=torch.float32)
    params[1].requires_grad_(True)
    backward(params)
    optimizer.step()
    assert params[1].grad_dtype is torch.float32
    optimizer.zero_grad()
    backward(params)
    assert params[1].grad is not None
    assert params[1].grad.dtype is torch.float32


def test_wide_parameters_are_left_alone() -> None:
    params = make_params(torch.float64)
    optimizer = FusedShardedAdam(params, accumulate_dtype=torch.float32)
    assert grad_dtype_of(params[0], torch.float32) is torch.float64
    backward(params)
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_the_estimate_counts_four_bytes(stage: int) -> None:
    numel = sum(NUMELS)
    found = [
        zerox.estimate(make_params(), 1, stage=stage, accumulate_dtype=dtype).local_gradients
        for dtype in (None, torch.float32)
    ]
    assert found == [2 * numel, 4 * numel]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="accumulate_dtype must be one of"):
        FusedShardedAdam(make_params(), accumulate_dtype=torch.float16)


def test_a_torch_without_grad_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerox.options.can_be_set", lambda: False)
    with pytest.raises(ValueError, match="needs a torch that has"):
        FusedShardedAdam(make_params(), accumulate_dtype=torch.float32)
