"""16-bit parameters with fp32 masters, models of several dtypes, autocast, and torch's GradScaler in stage 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.models import backward, batch, make_model, mean_over_ranks, memory_order
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.bucket import REMAINDER


def join(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of bf16 parameters and what rounding half away lost, in plain integers."""
    high = param.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def half_away(master: torch.Tensor) -> torch.Tensor:
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def masters_of(optimizer: FusedShardedAdam) -> list[tuple[torch.Tensor, slice, torch.Tensor]]:
    """(parameter, range of its elements, their masters) for what this rank owns."""
    found = []
    for bucket in optimizer._buckets:
        for segment in bucket.own_segments:
            span = slice(segment.span.start, segment.span.stop)
            values = bucket.param_shard[span]
            master = bucket.master[span]
            exact = join(values, master) if bucket.master_kind == REMAINDER else master.clone()
            place = slice(segment.param_start, segment.param_start + segment.span.numel)
            found.append((bucket.members[segment.slot].param, place, exact))
    return found


def follow_masters(rank: int, world_size: int, dtype: torch.dtype, kind: str, stage: int) -> None:
    model, twin = make_model(dtype), make_model(dtype)
    options = {"master_weights": kind, "stage": stage, "bucket_cap_mb": 0.03}
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, **options)
    shadows: dict[tuple[torch.Tensor, int], nn.Parameter] = {
        (param, place.start): nn.Parameter(exact) for param, place, exact in masters_of(optimizer)
    }
    reference = torch.optim.AdamW(shadows.values(), lr=1e-2, foreach=False)
    for step in range(4):
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        backward(twin, batch(rank, step, dtype=dtype))
        backward(model, batch(rank, step, dtype=dtype))
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        means = {param: mean_over_ranks(other.grad, param, world_size) for param, other in pairs}
        for (param, start), shadow in shadows.items():
            mean = means[param]
            shadow.grad = None if mean is None else memory_order(mean)[start : start + shadow.numel()].float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for param, place, exact in masters_of(optimizer):
            shadow = shadows[param, place.start]
            torch.testing.assert_close(exact, shadow.detach(), rtol=1e-6, atol=1e-8)
            rounded = half_away(exact) if kind == REMAINDER else exact.to(dtype)
            assert torch.equal(memory_order(param)[place], rounded), "a parameter is its master, rounded"
            shadow.data.copy_(exact)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "remainder"), (torch.bfloat16, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "auto")],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_masters_are_updated_as_fp32_parameters(world_size: int, dtype: torch.dtype, kind: str, stage: int) -> None:
    run_ranks(follow_masters, world_size, dtype, REMAINDER if kind == "auto" else kind, stage)


class Several(nn.Module):
    """A norm and a head in fp32 around a body in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(72)
        self.body = nn.Linear(72, 72).bfloat16()
        self.head = nn.Linear(72, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(x).bfloat16()).float())


def several_dtypes(rank: int, world_size: int, stage: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Several()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    first = None
    for _step in range(20):
        loss = model(batch(0, 0)).square().mean()
        first = first or float(loss)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss) < 0.2 * first
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_two_dtypes_trains_the_same_in_both_stages(world_size: int) -> None:
    stage_1, stage_2 = (run_ranks(several_dtypes, world_size, stage) for stage in (1, 2))
    for other in [*stage_1, *stage_2]:
        assert all(torch.equal(p, q) for p, q in zip(other, stage_2[0], strict=True))


def autocast(rank: int, world_size: int) -> None:
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), lr=1e-2, eps=1e-3)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    for step in range(3):
        for each in (model, twin):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = each(batch(rank, step)).float().square().mean()
            loss.backward()
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_trains_as_with_torch(world_size: int) -> None:
    run_ranks(autocast, world_size)


def scaled(rank: int, world_size: int) -> tuple[list[float], Any]:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales = []
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(batch(rank, step)).square().mean()
        if step == 1 and rank == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        skipped = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert skipped == (step == 1)
    return scales, [p.detach() for p in model.parameters()]


def test_torch_s_scaler_skips_the_step_on_all_ranks_when_one_overflows() -> None:
    results = run_ranks(scaled, 2)
    for scales, params in results:
        assert scales == [1024.0, 512.0, 512.0]
        assert all(torch.equal(p, q) for p, q in zip(params, results[0][1], strict=True))
