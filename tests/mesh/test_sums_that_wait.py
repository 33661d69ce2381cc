"""no_sync(outer=True): sums of several backwards wait on the shard axis, and go along the replicate axis once."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.mesh.test_two_levels import Awkward, loss_of, mesh_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

WORLD = 4
MICRO = 4
Inside = Callable[[FusedShardedAdam], AbstractContextManager[None]]


def locally(optimizer: FusedShardedAdam) -> AbstractContextManager[None]:
    return optimizer.no_sync()


def along_shard_axis(optimizer: FusedShardedAdam) -> AbstractContextManager[None]:
    return optimizer.no_sync(outer=True)


def built(model: nn.Module, dtype: torch.dtype | None = None) -> FusedShardedAdam:
    return FusedShardedAdam(
        model.parameters(), lr=0.01, process_group=mesh_of(2, 2), bucket_cap_mb=0.02, reduce_dtype=dtype
    )


def steps(rank: int, inside: Inside, ends_inside: bool, discards: bool, dtype: torch.dtype | None) -> list[Tensor]:
    """Norms and parameters. ``ends_inside``: no backward comes after the block. ``discards``: gradients, in between."""
    model = Awkward(torch.float32)
    optimizer = built(model, dtype)
    found = []
    for step in range(3):
        for micro in range(MICRO):
            with inside(optimizer) if ends_inside or micro < MICRO - 1 else nullcontext():
                loss_of(model, rank, step, micro).backward()
            if discards and micro == 1:
                if step == 0:
                    model.weights[0].grad = None
                elif step == 1:
                    optimizer.zero_grad(set_to_none=False)
                else:
                    optimizer.zero_grad()
        found.append(optimizer.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in model.parameters())]


def both_ways(rank: int, _: int, ends_inside: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [
        (
            steps(rank, along_shard_axis, ends_inside, discards=False, dtype=dtype),
            steps(rank, locally, ends_inside, discards=False, dtype=dtype),
        )
        for dtype in (None, torch.bfloat16)
    ]


@pytest.mark.parametrize("ends_inside", [False, True])
def test_what_waits_is_in_the_next_mean(ends_inside: bool) -> None:
    for ways in run_ranks(both_ways, WORLD, ends_inside):
        for (waited, local), tolerance in zip(ways, (1e-5, 3e-2), strict=True):
            for one, other in zip(waited, local, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def discarded(rank: int, _: int) -> tuple[list[Tensor], list[Tensor]]:
    """Beside a run in which every backward sends all, where what is discarded is known to be right."""
    everything: Inside = lambda optimizer: nullcontext()  # noqa: E731
    return steps(rank, along_shard_axis, False, True, None), steps(rank, everything, False, True, None)


def test_what_is_discarded_does_not_wait() -> None:
    for waited, sent in run_ranks(discarded, WORLD):
        for one, other in zip(waited, sent, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def sent(rank: int, _: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Over each axis: by one backward outside, and by as many as a step has, all but the last inside."""
    model = Awkward(torch.float32)
    optimizer = built(model)
    manager = optimizer.inside.manager
    counts = [manager.traffic_by_axis]
    for inside in (0, MICRO - 1):
        for micro in range(inside):
            with optimizer.no_sync(outer=True):
                loss_of(model, rank, 0, micro).backward()
        loss_of(model, rank, 0, MICRO).backward()
        optimizer.synchronize()
        counts.append(manager.traffic_by_axis)
    once, step = (
        [(a - c, b - d) for (a, b), (c, d) in zip(after, before, strict=True)]
        for before, after in itertools.pairwise(counts)
    )
    return once, step


def test_only_the_last_backward_goes_along_the_replicate_axis() -> None:
    for (inner, outer), (inner_of_step, outer_of_step) in run_ranks(sent, WORLD):
        assert inner_of_step == (MICRO * inner[0], MICRO * inner[1])
        assert outer_of_step == outer


def refused(rank: int, _: int) -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="needs a mesh"):
        FusedShardedAdam(params).no_sync(outer=True)
    with pytest.raises(ValueError, match="needs stage=2"):
        FusedShardedAdam(params, process_group=mesh_of(2, 2), stage=1).no_sync(outer=True)
    optimizer = FusedShardedAdam(params, process_group=mesh_of(2, 2))
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside no_sync"), optimizer.no_sync(outer=True):
        optimizer.step()
    params[0].sum().backward()
    with pytest.raises(RuntimeError, match="comes before the backwards that send everything"):
        optimizer.no_sync(outer=True).__enter__()
    optimizer.step()


def test_what_can_t_wait_is_refused() -> None:
    run_ranks(refused, WORLD)


def disagreeing(rank: int, _: int) -> tuple[float, str]:
    model = Awkward(torch.float32)
    optimizer = built(model)
    start = time.monotonic()
    with optimizer.no_sync(outer=True) if rank != 3 else nullcontext():
        loss_of(model, rank, 0, 0).backward()
    loss_of(model, rank, 0, 1).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return time.monotonic() - start, str(caught.value)


def test_ranks_that_disagree_are_told() -> None:
    for seconds, message in run_ranks(disagreeing, WORLD):
        assert re.search(r"rank 3 ran 0 backwards inside no_sync\(outer=True\), rank [012] ran 1", message)
        assert seconds < 20


def discarding_alone(rank: int, _: int, how: str) -> str:
    model = Awkward(torch.float32)
    optimizer = built(model)
    for micro in range(MICRO):
        with optimizer.no_sync(outer=True):
            loss_of(model, rank, 0, micro).backward()
        if micro == 1 and rank == 2 and how == "one":
            model.weights[4].grad = None
        if micro == 1 and (how == "later" or rank == 2) and how != "one":
            optimizer.zero_grad()
        if micro == 2 and rank == 2 and how == "later":
            optimizer.zero_grad()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 0, 0).backward()
    optimizer.step()  # goes on
    return str(caught.value)


@pytest.mark.parametrize("how", ["one", "all", "later"])
def test_what_some_ranks_discard_alone_is_an_error(how: str) -> None:
    for message in run_ranks(discarding_alone, WORLD, how):
        assert "discarded other gradients, and what waits can't be told. Call optimizer.zero_grad() on all" in message
