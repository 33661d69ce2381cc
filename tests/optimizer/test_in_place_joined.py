"""In-place operators on p.grad inside join(), where a rank has run out of batches: see test_in_place_grads.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import Chain, input_of
from tests.optimizer.test_in_place_grads import CHANGES, Change, Trained
from tests.ranks import run_ranks


def followed(rank: int, world_size: int, change: Change, num_backwards: int) -> list[Tensor]:
    made = Trained(rank, 2)
    with made.optimizer.join():
        for step in range(2 + 2 * rank):  # rank 0 runs out
            for micro in range(num_backwards):
                made.backward(3 * step + micro)
                change(made.params)
            made.optimizer.step()
            made.optimizer.zero_grad()
    return made.params


def followed_beside(rank: int, world_size: int, name: str) -> list[bool]:
    """Beside torch's optimizer on whole gradients. The mean is over both ranks, also where one has run out."""
    ours = followed(rank, world_size, CHANGES[name], 1)
    plain = Chain(3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        for each_rank in range(2) if step < 2 else [1]:
            (plain(input_of(each_rank, 3 * step)).square().sum() / 2).backward()
        CHANGES[name](list(plain.parameters()))
        reference.step()
        reference.zero_grad()
    return [torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, plain.parameters(), strict=True)]


@pytest.mark.parametrize("name", ["one alone", "clamp_", "clip_grad_value_", "by each one's norm"])
def test_a_rank_that_follows_does_what_the_others_did(name: str) -> None:
    first, second = run_ranks(followed_beside, 2, name)
    assert first == second == [True] * len(first)


def unfollowed(rank: int, world_size: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        followed(rank, world_size, CHANGES["clamp_"], 2)
    return str(caught.value)


def test_operators_between_backwards_can_t_be_followed() -> None:
    for message in run_ranks(unfollowed, 2):
        assert "can't follow operators on p.grad between two backwards" in message
