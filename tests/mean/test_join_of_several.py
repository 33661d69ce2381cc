"""Several optimizers in one loop of which ranks run out: a rank follows all, in whatever order they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import zerox
from tests.mean.tokens import EPS, assert_near, make_model, set_grads, summed_loss, tokens, true_sums
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD, GradScaler

ROWS = 4
BATCHES = (5, 2)


def mean_into(twin: nn.Module, step: int) -> None:
    sums = true_sums(twin, [tokens(r, step, 0, ROWS) for r in range(2) if step < BATCHES[r]])
    set_grads(twin, [each / 2 for each in sums])


def two_optimizers(rank: int, world_size: int, stages: tuple[int, int], together: bool) -> None:
    model, twin = make_model(), make_model()
    params, same = list(model.parameters()), list(twin.parameters())
    ours: list[Any] = [
        FusedShardedAdam(params[:3], eps=EPS, stage=stages[0]),
        FusedShardedSGD(params[3:], lr=1e-3, stage=stages[1]),
    ]
    theirs = [
        torch.optim.AdamW(same[:3], eps=EPS, foreach=False),
        torch.optim.SGD(same[3:], lr=1e-3, foreach=False),
    ]
    for step in range(max(BATCHES)):
        mean_into(twin, step)
        for each in [same] if together else [same[:3], same[3:]]:
            nn.utils.clip_grad_norm_(each, 0.1)
        for optimizer in theirs:
            optimizer.step()
    with zerox.join(ours):
        for step in range(BATCHES[rank]):
            summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
            if together:
                zerox.clip_grad_norm_(ours, 0.1)
            else:
                for optimizer in ours if step % 2 else reversed(ours):
                    optimizer.clip_grad_norm_(0.1)
            for optimizer in reversed(ours) if step % 2 else ours:
                optimizer.step()
            for optimizer in ours:
                optimizer.zero_grad()
    with ours[0].whole(), ours[1].whole():
        assert_near(model, twin)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stages", [(1, 2), (2, 3), (1, 1)])
def test_two_optimizers_are_followed_in_any_order(stages: tuple[int, int], together: bool) -> None:
    run_ranks(two_optimizers, 2, stages, together)


def one_raises(rank: int, world_size: int) -> str:
    """Rank 0 calls what can't be followed on the second optimizer: rank 1 gives up following both."""
    model = make_model()
    params = list(model.parameters())
    ours = [FusedShardedAdam(params[:3]), FusedShardedSGD(params[3:])]

    def loop() -> None:
        with zerox.join(ours):
            for step in range(BATCHES[rank]):
                summed_loss(model, tokens(rank, step, 0, ROWS)).backward()
                for optimizer in ours:
                    optimizer.step()
                    optimizer.zero_grad()
                if step == 3:
                    ours[1].full_state_dict()

    with pytest.raises(RuntimeError) as raised:
        loop()
    return str(raised.value)


def test_what_one_of_them_can_t_follow_raises_on_all_ranks() -> None:
    for said in run_ranks(one_raises, 2):
        assert "can't follow rank 0 into full_state_dict()" in said


def overflow(rank: int, world_size: int) -> None:
    """Inside torch's Join, with a step that the scaler skips and rank 1 follows."""
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), eps=EPS, stage=1)
    theirs = torch.optim.AdamW(twin.parameters(), eps=EPS, foreach=False)
    scaler = GradScaler("cpu", init_scale=64.0)
    for step in (0, 1, 2, 4):
        mean_into(twin, step)
        theirs.step()
    with Join([ours]):
        for step in range(BATCHES[rank]):
            loss = summed_loss(model, tokens(rank, step, 0, ROWS))
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
    with ours.whole():
        assert_near(model, twin)


def test_torch_s_join_goes_on_after_a_step_that_is_skipped() -> None:
    run_ranks(overflow, 2)
