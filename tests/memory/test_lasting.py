"""Bytes per rank, from the allocator's own reports, beside the formula."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_ranks
from zerox import FusedShardedAdam, MemoryBytes, estimate

SMALL_THINGS = 64 * 1024  # tables, step counts, messages


def allocated(prof: Any) -> int:
    """What the allocator handed out minus what it got back while the profile ran."""
    return sum(event.nbytes() for event in prof.profiler.kineto_results.events() if event.name() == "[memory]")


def construct(
    rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[int, MemoryBytes, MemoryBytes]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        # The old storages die inside the profile too: what is left are the flat buffers and the state.
        model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False)).to(dtype)
        optimizer = FusedShardedAdam(model.parameters(), **options)
    return allocated(prof), optimizer.memory_bytes(), estimate(model.parameters(), world_size, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"amsgrad": True}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"master_weights": "fp32"}),
        (torch.float16, {"stage": 1}),
        (torch.float64, {}),
        (torch.float32, {"state_dtype": torch.bfloat16, "amsgrad": True}),
        (torch.bfloat16, {"state_dtype": "8bit"}),
        (torch.float32, {"state_dtype": "8bit", "amsgrad": True}),
        (torch.float64, {"state_dtype": "8bit"}),
    ],
    ids=str,
)
def test_state_and_masters_are_one_share_of_the_total(dtype: torch.dtype, options: Any, world_size: int) -> None:
    whole = estimate([torch.empty(512 * 1024 * 2 + 1024, dtype=dtype, requires_grad=True)], 1, **options)
    for got, measured, formula in run_ranks(construct, world_size, dtype, options):
        expected = formula.parameters + formula.master + formula.moments
        assert expected <= got <= expected + SMALL_THINGS
        assert (measured.parameters, measured.master, measured.moments) == (
            formula.parameters,
            formula.master,
            formula.moments,
        )
        # In 8 bits the bias has a bucket of its own, of which each rank's shard could hold all of it.
        padding = 1.02 if options.get("state_dtype") == "8bit" else 1.01
        assert whole.moments / world_size <= formula.moments <= whole.moments / world_size * padding
        assert whole.master / world_size <= formula.master <= whole.master / world_size * padding


def gradients(rank: int, world_size: int, stage: int, dtype: torch.dtype, reduce_dtype: Any) -> tuple[MemoryBytes, Any]:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False)).to(dtype)
    options = {"stage": stage, "reduce_dtype": reduce_dtype}
    optimizer = FusedShardedAdam(model.parameters(), **options)
    model(torch.ones(1, 512, dtype=dtype)).sum().backward()
    optimizer.step()
    held = optimizer.memory_bytes()
    optimizer.zero_grad()
    assert optimizer.memory_bytes().gradients == 0
    return held, estimate(model.parameters(), world_size, **options)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_take_what_the_formula_says(world_size: int, stage: int, reduce_dtype: Any) -> None:
    for held, formula in run_ranks(gradients, world_size, stage, torch.bfloat16, reduce_dtype):
        assert held.gradients == formula.gradients


@pytest.mark.parametrize(
    ("backend", "local_world_size", "received"), [("gloo", None, 0), ("gloo", 2, 2), ("gloo", 1, 3), ("nccl", None, 1)]
)
def test_exchange_buffers_are_those_of_the_backend(backend: str, local_world_size: int | None, received: int) -> None:
    params = [torch.empty(4 * 8192, requires_grad=True)]
    slice_bytes = (8192 + 64) * 4  # flags take 64 elements behind each shard
    formula = estimate(params, 4, backend=backend, local_world_size=local_world_size, bucket_cap_mb=1024)
    assert formula.exchange == 2 * (4 + received) * slice_bytes


def test_deletion_frees_everything_at_once() -> None:
    model = nn.Linear(256, 256)
    torch.optim.AdamW(model.parameters())  # the first optimizer of a process stays in frames of torch's lazy imports
    gc.disable()
    try:
        optimizer = FusedShardedAdam(model.parameters())
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        alive = [weakref.ref(bucket) for bucket in optimizer.inside.buckets] + [weakref.ref(optimizer.inside.manager)]
        del optimizer
        assert [ref() for ref in alive] == [None] * len(alive), "a reference cycle keeps the optimizer alive"
    finally:
        gc.enable()
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    assert model.weight.grad is not None
    assert float(model.weight.grad.sum()) == 256 * 256


@pytest.mark.parametrize("options", [{}, {"stage": 1, "state_dtype": "8bit"}], ids=str)
def test_a_model_without_memory_is_estimated_as_one_on_the_cpu(options: Any) -> None:
    sizes = {"d_model": 64, "nhead": 2, "dim_feedforward": 256}
    real = nn.TransformerEncoderLayer(**sizes, device="cpu")
    meta = nn.TransformerEncoderLayer(**sizes, device="meta")
    assert estimate(meta.parameters(), 4, **options) == estimate(real.parameters(), 4, **options)
    with pytest.raises(ValueError, match="meta device"):
        FusedShardedAdam(meta.parameters(), **options)
