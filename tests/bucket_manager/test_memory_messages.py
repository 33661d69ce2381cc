"""Messages that ranks of one machine read in each other's memory: the right ones, to the end, and when a rank fails."""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.test_neighbours import EVERYWHERE, ONE_MACHINE, running
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks
from zerox import _C as C
from zerox.ranks.group import Ranks, find_ranks

ROUNDS = 40
SOON_S = 20  # on a busy machine
LONG_S = 120  # a timeout that no test waits for
LARGE = 16 * 1024 * 1024  # elements: reading them takes some 10 ms


def meet() -> tuple[Ranks, C.PeerMessages]:
    ranks = find_ranks(None)
    return ranks, C.PeerMessages(ranks.control, ranks.failure_detector)


def message(sender: int, receiver: int, nth: int) -> Tensor:
    """Of some length, which may be 0."""
    numel = (7 * sender + 5 * receiver + 3 * nth) % 11 * 100
    return torch.full((numel,), 10_000 * nth + 100 * sender + receiver, dtype=torch.int32)


def swap_many(rank: int, world_size: int, where: str) -> None:
    with running(where, rank):
        ranks, messages = meet()
        assert messages.are_in_memory == (where == ONE_MACHINE)
        sent_bytes = 0
        for nth in range(ROUNDS):
            if nth % world_size == rank:
                time.sleep(0.002)  # it is late
            sent = [message(rank, other, nth) for other in range(world_size)]
            expected = [message(other, rank, nth) for other in range(world_size)]
            found = messages.swap(sent, [each.numel() for each in expected])
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), nth
            to_all = messages.to_all(torch.tensor([nth, rank]))
            assert [each.tolist() for each in to_all] == [[nth, other] for other in range(world_size)]
            sent_bytes += sum(each.nbytes for other, each in enumerate(sent) if other != rank)
            sent_bytes += 16 * (world_size - 1)
        assert messages.traffic == (2 * ROUNDS * (world_size - 1), sent_bytes)
        del ranks


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_rank_gets_its_messages(world_size: int, where: str) -> None:
    run_ranks(swap_many, world_size, where)


def end_at_once(rank: int, _: int) -> bool:
    _ranks, messages = meet()
    messages.to_all(torch.zeros(1))
    own = torch.full((LARGE if rank == 0 else 1,), float(rank))
    found = messages.swap([own, own], [LARGE, 1])
    if rank == 0:
        fail_now(SIGKILL)  # its memory is gone
    return bool((found[0] == 0).all())


def test_a_rank_may_end_right_after_the_last_message(tmp_path: Path) -> None:
    ranks = start_ranks(end_at_once, 2, folder=tmp_path / "ranks", timeout_s=LONG_S)
    try:
        assert ranks.answer(1, SOON_S) is True
    finally:
        ranks.close()


def fail_between(rank: int, _: int, how: str) -> str:
    ranks, messages = meet()
    for _round in range(3):
        messages.to_all(torch.zeros(4))
    if rank == 1 and how == "dies":
        fail_now(SIGKILL)
    if rank == 1 and how == "gives up":
        ranks.failure_detector.leave("zerox: rank 1 has lost its data")
    if rank == 1 and how == "is late":
        time.sleep(4)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        messages.to_all(torch.zeros(4))
    with pytest.raises(RuntimeError) as again:
        messages.to_all(torch.zeros(4))
    assert str(again.value) == str(raised.value)
    return f"{raised.value} [{time.monotonic() - start:.0f} s]"


@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [
        ("dies", LONG_S, "rank 1 is gone: its connection ended without a word"),
        ("gives up", LONG_S, "zerox: rank 1 has lost its data"),
        ("is late", 1, "rank 1 did not come within 1 s"),
    ],
)
def test_a_rank_that_does_not_answer_is_named(how: str, timeout_s: float, said: str, tmp_path: Path) -> None:
    ranks = start_ranks(fail_between, 3, how, folder=tmp_path / "ranks", timeout_s=timeout_s)
    try:
        for rank in (0, 2):
            answer = ranks.answer(rank, SOON_S)
            assert answer is not None, f"rank {rank} waits for its timeout"
            assert answer.startswith(said), answer
    finally:
        ranks.close()
