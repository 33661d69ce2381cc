"""Groups that are added later: taken in by all ranks alike, or refused without a trace."""

from __future__ import annotations

import pytest
import torch

from tests.optimizer.models import backward, batch, make_model, mean_over_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

EPS = 1e-3  # see test_torch_behaviour.py


def add_between_backward_and_step(rank: int, world_size: int, stage: int) -> None:
    """Rank 1 runs no backward before the group is added: it takes part in the others' first."""
    model, twin = make_model(), make_model()
    late = {id(p) for p in model.outer.parameters()}
    ours = FusedShardedAdam([p for p in model.parameters() if id(p) not in late], lr=1e-2, eps=EPS, stage=stage)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=EPS, foreach=False)
    if rank != 1:
        backward(model, batch(rank, 0))
        backward(twin, batch(rank, 0))
    ours.add_param_group({"params": list(model.outer.parameters())})
    for step in (1, 2, 3):
        for param in twin.parameters():
            param.grad = mean_over_ranks(param.grad, param, world_size)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        backward(model, batch(rank, step))
        backward(twin, batch(rank, step))


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)])
def test_a_group_may_be_added_between_backward_and_step(stage: int, world_size: int) -> None:
    run_ranks(add_between_backward_and_step, world_size, stage)


def test_inner_no_sync_does_not_end_the_outer_one() -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters())
    with optimizer.no_sync():
        with optimizer.no_sync():
            backward(model, batch(0, 0))
        backward(model, batch(0, 1))
        assert optimizer.inside.manager.flights.num_launched == 0
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
    optimizer.step()
    assert optimizer.inside.manager.flights.num_launched > 0
