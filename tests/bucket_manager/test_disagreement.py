"""Ranks that do different things get an error on all of them that says what each did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import Chain, input_of, message_of, same_bits
from tests.bucket_manager.training import Training, both_stages, clean_run
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

CALLS: dict[str, Callable[[FusedShardedAdam], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "clip": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "synchronize": lambda optimizer: optimizer.synchronize(),
}


def different_numbers_of_backwards(rank: int, _: int, stage: int, call: str) -> tuple[str, bool, list[Tensor]]:
    training = Training(rank, stage)
    before = training.snapshot()

    def rounds() -> None:
        for seed in range(3 if rank == 1 else 2):
            training.backward(seed)
        CALLS[call](training.optimizer)

    message = message_of(rounds)
    untouched = training.is_as(before)
    training.optimizer.zero_grad()
    for seed in (0, 2, 3):
        training.backward(seed)
        training.optimizer.step()
        training.optimizer.zero_grad()
    return message, untouched, training.snapshot()


@both_stages
@pytest.mark.parametrize("call", CALLS)
def test_different_numbers_of_backwards_raise_on_all_ranks_with_both_counts(stage: int, call: str) -> None:
    clean = run_ranks(clean_run, 3, stage)
    results = run_ranks(different_numbers_of_backwards, 3, stage, call)
    for (message, untouched, after), theirs in zip(results, clean, strict=True):
        assert "ran 2 " in message
        assert "rank 1 ran 3" in message
        assert untouched
        assert all(same_bits(a, b) for a, b in zip(after, theirs, strict=True))


def one_rank_without_backward(rank: int, world_size: int, stage: int, idle: int) -> tuple[bool, list[Tensor]]:
    training = Training(rank, stage)
    plain = Chain(4)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        if step != 1 or rank != idle:
            training.backward(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
        for r in range(world_size):
            if step != 1 or r != idle:
                (plain(input_of(r, step)).square().mean() / world_size).backward()
        reference.step()
        reference.zero_grad()
    pairs = zip(training.model.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs), training.snapshot()[:8]


@both_stages
@pytest.mark.parametrize("idle", [0, 2])
def test_a_rank_without_a_backward_takes_part_with_all_gradients_absent(stage: int, idle: int) -> None:
    results = run_ranks(one_rank_without_backward, 3, stage, idle)
    for follows_torch, params in results:
        assert follows_torch
        assert all(same_bits(a, b) for a, b in zip(params, results[0][1], strict=True))


def idle_after_an_error(rank: int, _: int) -> str:
    """As idle ranks do, but in the first step after an error that zero_grad() cleaned up."""
    training = Training(rank, stage=2)
    for seed in range(2 if rank == 1 else 1):
        training.backward(seed)
    assert "synchronising backwards" in message_of(training.optimizer.step)
    training.optimizer.zero_grad()
    if rank == 1:
        training.backward(2)
    return message_of(training.optimizer.step)


def test_a_rank_without_a_backward_takes_part_after_an_error_too() -> None:
    assert run_ranks(idle_after_an_error, 2) == ["no error"] * 2


def no_backward_at_all(rank: int, _: int, stage: int) -> bool:
    training = Training(rank, stage)
    before = training.snapshot()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.optimizer.step()
    return training.is_as(before)


@both_stages
def test_step_before_any_backward_changes_nothing(stage: int) -> None:
    assert run_ranks(no_backward_at_all, 2, stage) == [True, True]


def step_beside_clip(rank: int, _: int, stage: int) -> tuple[str, bool]:
    training = Training(rank, stage)
    training.backward(0)
    before = training.snapshot()
    call = training.optimizer.step if rank == 0 else lambda: training.optimizer.clip_grad_norm_(1.0)
    message = message_of(call)
    untouched = training.is_as(before)
    training.optimizer.step()
    return message, untouched


@both_stages
def test_step_on_one_rank_beside_clip_on_another_raises_on_both(stage: int) -> None:
    for message, untouched in run_ranks(step_beside_clip, 2, stage):
        assert "rank 0 is in step()" in message
        assert "rank 1 is in clip_grad_norm_()" in message
        assert untouched
