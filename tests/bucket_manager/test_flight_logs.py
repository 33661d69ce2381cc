"""Flights of neighbours, which tell each other in memory where messages lie and that they have read them."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import GradsOfModel
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.ranks.group import find_ranks

SOON_S = 20  # on a busy machine
LONG_S = 120  # a timeout that no test waits for
STEPS = {2: 300, 3: 100, 4: 100}  # with 12 buckets and two backwards each, some 40 turns of a ring or more
MANY = 2_100  # buckets: the ring of a log grows five times


def model_of(num_params: int) -> nn.ParameterList:
    return nn.ParameterList(torch.full((64,), float(index)) for index in range(num_params))


def backward(params: nn.ParameterList, factor: float) -> None:
    sum((factor * (index + 1) * p).sum() for index, p in enumerate(params)).backward()


def many_flights(rank: int, world_size: int) -> None:
    """Many buckets and two backwards a step: several flights of a bucket are under way."""
    params = model_of(12)
    grads = GradsOfModel(find_ranks(None), list(params), cap_bytes=256)
    assert len(grads.buckets) == len(params)
    for step in range(STEPS[world_size]):
        for part in (1, 2):
            backward(params, factor=part * (rank + 1) * (step + 1))
        mean = 3 * (step + 1) * (world_size + 1) / 2
        grads.sync()
        grads.expect([torch.full((64,), mean * (index + 1)) for index in range(len(params))])
        grads.grads.zero(set_to_none=True)


def test_many_flights_bring_what_was_sent() -> None:
    for world_size in STEPS:
        run_ranks(many_flights, world_size)


def more_than_places(_rank: int, _: int) -> list[Tensor]:
    params = model_of(MANY)
    optimizer = FusedShardedAdam(params.parameters(), lr=0.5, bucket_cap_mb=1e-4)
    assert len(optimizer.inside.buckets) == MANY
    for _step in range(3):
        step_once(params, optimizer)
    return [p.detach() for p in params]


def test_there_may_be_more_flights_than_a_ring_has_places() -> None:
    found, _ = run_ranks(more_than_places, 2)
    params = model_of(MANY)
    optimizer = FusedShardedAdam(params.parameters(), lr=0.5, process_group="alone")
    for _step in range(3):
        step_once(params, optimizer)
    assert all(torch.equal(one, other.detach()) for one, other in zip(found, params, strict=True))


def step_once(params: nn.ParameterList, optimizer: FusedShardedAdam) -> None:
    backward(params, factor=0.1)
    optimizer.step()
    optimizer.zero_grad()


def end_at_once(rank: int, _: int) -> list[Tensor]:
    params = model_of(5)
    optimizer = FusedShardedAdam(params.parameters(), lr=0.5, bucket_cap_mb=1e-3)
    step_once(params, optimizer)
    if rank == 0:
        fail_now(SIGKILL)  # its memory is gone
    return [p.detach() for p in params]


def test_a_rank_may_end_right_after_its_last_step(tmp_path: Path) -> None:
    ranks = start_ranks(end_at_once, 2, folder=tmp_path / "ranks", timeout_s=LONG_S)
    try:
        found = ranks.answer(1, SOON_S)
    finally:
        ranks.close()
    params = model_of(5)
    step_once(params, FusedShardedAdam(params.parameters(), lr=0.5, process_group="alone"))
    assert all(torch.equal(one, other.detach()) for one, other in zip(found, params, strict=True))
