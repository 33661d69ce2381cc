"""16-bit parameters with fp32 masters, also loaded ones, several dtypes, autocast, torch's GradScaler in stage 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bucket_manager.rig import same_bits
from tests.optimizer.models import batch, make_model, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def kinds_kept(dtype: torch.dtype) -> list[str]:
    param = nn.Parameter(torch.ones(300, dtype=dtype))
    return sorted(FusedShardedAdam([param]).state[param])


def test_the_default_master_is_the_remainder_for_bf16_fp32_for_fp16_and_none_for_others() -> None:
    plain = ["exp_avg", "exp_avg_sq", "step"]
    assert kinds_kept(torch.bfloat16) == sorted([*plain, "remainder"])
    assert kinds_kept(torch.float16) == sorted([*plain, "master"])
    assert kinds_kept(torch.float32) == kinds_kept(torch.float64) == plain


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


def loaded_where_they_went(_: int, __: int, dtype: torch.dtype, stage: int, has_masters: bool) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(72, 72).to(dtype) for _ in range(2)]
    first, second = (FusedShardedAdam(model.parameters(), stage=stage, master_weights="auto") for model in models)
    models[0](batch(0, 0, dtype=dtype)).float().square().mean().backward()
    first.step()
    states = [first.full_state_dict(to=to) for to in range(dist.get_world_size())]
    state = states[dist.get_rank()]
    masters = [kept.pop("master") if not has_masters else kept["master"] for kept in state["state"].values()]
    with first.whole():
        values = [p.detach().clone() for p in models[0].parameters()]
    for param, value in zip(models[1].parameters(), values, strict=True):
        param.data = value  # as after .to(device) once the optimizer was built
    second.load_state_dict(state)
    found = [second.full_state(p)["master"] for p in models[1].parameters()]
    expected = masters if has_masters else [value.float() for value in values]
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    assert same_bits(masters[0], values[0].float()) is False, "there is something to lose"


@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_are_loaded_for_the_values_of_parameters_that_lie_elsewhere(
    world_size: int, dtype: torch.dtype, stage: int, has_masters: bool
) -> None:
    run_ranks(loaded_where_they_went, world_size, dtype, stage, has_masters)


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
