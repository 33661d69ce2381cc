"""An exception in backward on one rank: zero_grad() makes all ranks clean, or all raise and state is as it was."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.bucket_manager.rig import message_of, same_bits
from tests.bucket_manager.training import Training, both_stages, clean_run
from tests.ranks import run_ranks


def raise_on_rank_1_then_zero_grad(rank: int, _: int, fail_in: int) -> list[Tensor]:
    training = Training(rank, stage=2)
    for seed in (0, 1, 2, 3):
        try:
            training.backward(seed, fail_in if (rank, seed) == (1, 1) else None)
        except ArithmeticError:
            assert (rank, seed) == (1, 1)
        if seed != 1:
            training.optimizer.step()
        training.optimizer.zero_grad()
    return training.snapshot()


@pytest.mark.parametrize("fail_in", [0, 1, 2])
def test_after_an_exception_in_backward_zero_grad_on_all_ranks_makes_them_clean(fail_in: int) -> None:
    clean = run_ranks(clean_run, 3, 2)
    for ours, theirs in zip(run_ranks(raise_on_rank_1_then_zero_grad, 3, fail_in), clean, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def raise_on_rank_1_in_stage_1(rank: int, _: int) -> tuple[list[str], list[Tensor]]:
    """Where gradients are gathered at its end, backward itself says so on the ranks that wait there."""
    training = Training(rank, stage=1)
    messages = []
    for seed in (0, 1, 2, 3):
        try:
            training.backward(seed, 1 if (rank, seed) == (1, 1) else None)
            if seed != 1:
                training.optimizer.step()
        except ArithmeticError:
            messages.append(message_of(training.optimizer.step))
        except RuntimeError as error:
            messages.append(str(error))
        training.optimizer.zero_grad()
    return messages, training.snapshot()


def test_in_stage_1_all_ranks_raise_naming_the_rank_and_then_go_on() -> None:
    clean = run_ranks(clean_run, 3, 1)
    for (messages, ours), theirs in zip(run_ranks(raise_on_rank_1_in_stage_1, 3), clean, strict=True):
        assert len(messages) == 1
        assert "rank 1" in messages[0]
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def raise_on_rank_1_then_zero_grad_in_stage_1(rank: int, _: int) -> tuple[list[str], list[Tensor]]:
    training = Training(rank, stage=1)
    messages = []
    for seed in (0, 1, 2, 3):
        try:
            training.backward(seed, 1 if (rank, seed) == (1, 1) else None)
            if seed != 1:
                training.optimizer.step()
        except ArithmeticError:
            pass
        except RuntimeError as error:
            messages.append(f"backward {seed}: {error}")
        training.optimizer.zero_grad()
    return messages, training.snapshot()


def test_in_stage_1_zero_grad_after_an_exception_keeps_ranks_in_step() -> None:
    """The same, when the rank that failed calls zero_grad() first: the others hear of it in that very backward."""
    clean = run_ranks(clean_run, 2, 1)
    results = run_ranks(raise_on_rank_1_then_zero_grad_in_stage_1, 2, timeout_s=8)
    for (messages, ours), theirs in zip(results, clean, strict=True):
        assert all(message.startswith("backward 1: ") and "rank 1" in message for message in messages)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def raise_before_any_gradient(rank: int, _: int, stage: int) -> tuple[str, list[Tensor]]:
    training = Training(rank, stage)
    try:
        training.backward(0, fail_in=3 if rank == 1 else None)
    except ArithmeticError:
        assert rank == 1
    return message_of(training.optimizer.step), training.snapshot()[:8]


@both_stages
def test_an_exception_before_the_first_gradient_is_as_no_backward_at_all(stage: int) -> None:
    """Nothing of zerox's ran: it can't be told from a rank that skipped its backward."""
    results = run_ranks(raise_before_any_gradient, 2, stage)
    assert [message for message, _ in results] == ["no error"] * 2
    assert all(same_bits(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def raise_then_step(rank: int, _: int, stage: int, fail_in: int) -> tuple[list[str], bool]:
    training = Training(rank, stage)
    training.backward(0)
    training.optimizer.step()
    training.optimizer.zero_grad()
    before = training.snapshot()
    messages = []
    try:
        training.backward(1, fail_in if rank == 1 else None)
    except ArithmeticError:
        pass
    except RuntimeError as error:
        messages.append(str(error))
    if not messages:
        messages.append(message_of(training.optimizer.step))
    untouched = training.is_as(before)
    training.optimizer.zero_grad()
    training.backward(2)
    training.optimizer.step()
    return messages, untouched


@both_stages
@pytest.mark.parametrize("fail_in", [0, 2])
def test_step_after_an_exception_in_backward_raises_on_all_ranks_and_touches_no_state(stage: int, fail_in: int) -> None:
    for messages, untouched in run_ranks(raise_then_step, 3, stage, fail_in):
        assert len(messages) == 1
        assert "rank 1" in messages[0]
        assert "exception" in messages[0]
        assert "zero_grad" in messages[0]
        assert untouched


def raise_then_backward(rank: int, _: int) -> str:
    training = Training(rank, stage=2)
    with pytest.raises(ArithmeticError):
        training.backward(0, fail_in=1)
    message = message_of(lambda: training.backward(1))
    training.optimizer.zero_grad()
    training.backward(2)
    training.optimizer.step()
    return message


def test_another_backward_after_an_exception_asks_for_zero_grad() -> None:
    for message in run_ranks(raise_then_backward, 2):
        assert "zero_grad" in message


def raise_on_rank_1_zero_there_step_everywhere(rank: int, _: int, fail_in: int) -> tuple[bool, list[Tensor]]:
    training = Training(rank, stage=2)  # in the first step, rank 1 has nothing yet that it could discard by itself
    before = training.snapshot()
    if rank == 1:
        with pytest.raises(ArithmeticError):
            training.backward(1, fail_in=fail_in)
        training.optimizer.zero_grad()
    else:
        training.backward(1)
    training.optimizer.step()
    return training.is_as(before), [p.detach() for p in training.model.parameters()]


@pytest.mark.parametrize("fail_in", [0, 2])
def test_what_one_rank_discards_after_an_exception_no_rank_uses(fail_in: int) -> None:
    for untouched, _ in run_ranks(raise_on_rank_1_zero_there_step_everywhere, 3, fail_in):
        assert untouched


def raise_before_any_gradient_then_zero_grad(rank: int, _: int) -> tuple[list[str], bool, list[Tensor]]:
    training = Training(rank, stage=2)
    before = training.snapshot()
    try:
        training.backward(1, fail_in=3 if rank == 1 else None)
    except ArithmeticError:
        assert rank == 1
    training.optimizer.zero_grad()
    training.backward(2)
    messages = [message_of(training.optimizer.step)]
    untouched = training.is_as(before)
    training.optimizer.zero_grad()
    for seed in (0, 2, 3):
        training.backward(seed)
        training.optimizer.step()
        training.optimizer.zero_grad()
    return messages, untouched, training.snapshot()


def test_an_exception_before_the_first_gradient_is_found_by_the_counts_of_backwards() -> None:
    """zero_grad() is local, so the other ranks still count the backward that rank 1 did not get to."""
    clean = run_ranks(clean_run, 3, 2)
    results = run_ranks(raise_before_any_gradient_then_zero_grad, 3)
    for (messages, untouched, ours), theirs in zip(results, clean, strict=True):
        assert "rank 1 ran 1 synchronising backwards since the last step" in messages[0]
        assert " ran 2. Call optimizer.zero_grad() on all ranks" in messages[0]
        assert untouched
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def two_ranks_raise_in_stage_1(rank: int, _: int) -> tuple[list[str], bool, list[Tensor]]:
    """Rank 1 inside its backward, rank 2 before its first gradient: nothing of zerox's ran there."""
    training = Training(rank, stage=1)
    before = training.snapshot()
    messages = []
    for seed in (1, 0, 2, 3):
        try:
            training.backward(seed, {1: 1, 2: 3}.get(rank) if seed == 1 else None)
            training.optimizer.step()
        except ArithmeticError:
            assert seed == 1
        except RuntimeError as error:
            messages.append(f"{seed}: {error}")
            assert training.is_as(before)
        training.optimizer.zero_grad()
        if rank == 2 and seed == 1:  # its next backward is where the others are
            messages.append(message_of(lambda: training.backward(9)))
            assert training.is_as(before)
            training.optimizer.zero_grad()
    return messages, True, training.snapshot()


def test_in_stage_1_a_rank_that_raised_before_any_gradient_meets_the_others_in_its_next_backward() -> None:
    clean = run_ranks(clean_run, 3, 1)
    results = run_ranks(two_ranks_raise_in_stage_1, 3, timeout_s=20)
    for rank, ((messages, _, ours), theirs) in enumerate(zip(results, clean, strict=True)):
        assert len(messages) == (0 if rank == 1 else 1)
        assert all("rank 1 can't go on" in message for message in messages)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
