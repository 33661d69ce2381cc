"""join(): ranks with unequal numbers of batches. The reference: one process that has all ranks' batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from tests.mean.tokens import EPS, assert_near, cap_mb, make_model, set_grads, summed_loss, tokens, true_sums
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam, GradScaler

STAGES = (1, 2, 3)
BATCHES = [(5, 3), (0, 4), (7, 7), (1, 9), (3, 5, 0), (2, 2, 4)]
ROWS = 4


def expected_model(batches: tuple[int, ...], divide: str, clips: bool, micros: int = 1) -> nn.Module:
    twin = make_model()
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    for step in range(-(-max(batches) // micros)):
        own = [
            [tokens(r, step, m, ROWS) for m in range(micros) if step * micros + m < count]
            for r, count in enumerate(batches)
        ]
        active = sum(1 for each in own if each)
        sums = true_sums(twin, [x for each in own for x in each])
        set_grads(twin, [each / (active if divide == "active" else len(batches)) for each in sums])
        if clips:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        theirs.step()
    return twin


def train(
    rank: int,
    world_size: int,
    batches: tuple[int, ...],
    stage: int,
    divide: str,
    clips: bool,
    scales: bool,
    hides: bool,
    by_torch: bool,
) -> None:
    model = make_model()
    cap = cap_mb(stage, several=batches == BATCHES[0])
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=stage, bucket_cap_mb=cap)
    if hides:
        ours.overlap_gather(model)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=scales)
    block: Any = Join([ours], divide_by_initial_world_size=divide == "all") if by_torch else ours.join(divide)
    with block:
        for step in range(batches[rank]):
            scaler.scale(summed_loss(model, tokens(rank, step, 0, ROWS))).backward()
            if clips:
                scaler.unscale_(ours)
                ours.clip_grad_norm_(0.3)
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
    ours.synchronize()
    with ours.whole():
        assert_near(model, expected_model(batches, divide, clips))


WAYS: list[dict[str, Any]] = [
    {},
    {"divide": "active"},
    {"clips": True},
    {"clips": True, "scales": True, "divide": "active"},
    {"hides": True, "clips": True},
    {"by_torch": True},
    {"by_torch": True, "divide": "active", "clips": True},
]
FEW = [WAYS[0], WAYS[3]]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("way", "batches"), thinned(WAYS, FEW, BATCHES, [(3, 5, 0)]), ids=str)
def test_a_rank_that_has_run_out_follows_until_all_have(
    stage: int, batches: tuple[int, ...], way: dict[str, Any]
) -> None:
    options = {"divide": "all", "clips": False, "scales": False, "hides": False, "by_torch": False} | way
    run_ranks(train, len(batches), batches, stage, *options.values())
