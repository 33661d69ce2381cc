"""Optimizers over different ranks have no common norm: each of their ranks is told, whatever it can see by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerox
from tests.ranks import Once
from zerox import FusedShardedSGD
from zerox.ranks.process_group import ALONE

FASTER_THAN_S = 20  # the ranks' timeout is 30


def made(group: Any = None) -> FusedShardedSGD:
    """Its gradient is the same on all ranks, of norm 4."""
    param = nn.Parameter(torch.zeros(16))
    optimizer = FusedShardedSGD([("w", param)], lr=1.0, process_group=group)
    param.sum().backward()
    return optimizer


class Groups:
    """Ranks 0 to 3 as halves and pairs, and this rank's own half and pair among them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        self.across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        self.first_three = dist.new_group([0, 1, 2])


Clipped = tuple[list[FusedShardedSGD], Any]  # the optimizers, and ``group``


def dense_and_expert(groups: Groups) -> Clipped:
    return [made(), made(groups.half)], None


def in_other_orders(groups: Groups) -> Clipped:
    both = [made(), made(groups.half)]
    return (both if groups.rank % 2 else both[::-1]), None


def expert_on_some_ranks(groups: Groups) -> Clipped:
    """Ranks 2 and 3 see two optimizers over the same ranks, and nothing wrong."""
    dense = [made(), made()]
    return (dense if groups.rank > 1 else [made(groups.half), *dense]), None


def alone(groups: Groups) -> Clipped:
    return [made(), made(ALONE)], None


def own_ranks(groups: Groups) -> Clipped:
    return [made()], groups.half


def own_ranks_beside_another(groups: Groups) -> Clipped:
    """Rank 2 sees one rank of its own half in the group, and nothing wrong. Rank 3 is not in it."""
    optimizer = made(groups.half)
    return [optimizer], groups.first_three if groups.rank < 3 else dist.GroupMember.NON_GROUP_MEMBER


def not_all_pass_the_group(groups: Groups) -> Clipped:
    return [made(groups.half)], groups.across if groups.rank in (0, 2) else None


OVER_OTHERS = r"optimizer 0 is over ranks \[[0-3, ]*\], optimizer \d over ranks \[[0-3, ]*\]: .*process_group"
CASES: dict[str, tuple[Callable[[Groups], Clipped], str]] = {
    "dense and expert": (dense_and_expert, OVER_OTHERS),
    "in other orders": (in_other_orders, OVER_OTHERS),
    "an expert on some ranks": (expert_on_some_ranks, r"optimizer 0 is over ranks \[0, 1\], optimizer 1 over .* 3\]"),
    "alone": (alone, OVER_OTHERS),
    "a group of own ranks": (
        own_ranks,
        r"group= has ranks \[(0, 1|2, 3)\], .* over ranks \[0, 1, 2, 3\]: .*more than once",
    ),
    "own ranks beside another": (
        own_ranks_beside_another,
        r"group= has ranks \[0, 1\], .* over ranks \[0, 1\]|group must be a ProcessGroup this process is in",
    ),
    "not all pass the group": (not_all_pass_the_group, "ranks passed different arguments to zerox.clip_grad_norm_"),
}


def refused(rank: int, world_size: int) -> dict[str, tuple[str, float, list[float]]]:
    """What each case raised, after how many seconds, and the parameters after the next step."""
    groups, found = Groups(rank), {}
    for name, (case, _) in CASES.items():
        optimizers, group = case(groups)
        start = time.monotonic()
        try:
            said = f"taken: {zerox.clip_grad_norm_(optimizers, 1.0, group=group)}"
        except (ValueError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        took, after = time.monotonic() - start, []
        for optimizer in sorted(optimizers, key=lambda each: each.inside.ranks.size):
            [param] = optimizer.param_groups[0]["params"]
            optimizer.zero_grad()
            (2 * param.sum()).backward()
            optimizer.step()
            after.append(param[0].item())
        found[name] = said, took, after
        dist.barrier()
    return found


all_refused = Once(refused, 4, timeout_s=30)


@pytest.mark.parametrize("name", CASES)
def test_optimizers_over_other_ranks_are_refused_on_all_ranks_and_the_next_step_goes_on(name: str) -> None:
    for said, took, after in (found[name] for found in all_refused()):
        kind = "RuntimeError" if "not all" in name else "ValueError"
        with pytest.raises(AssertionError, match=f"^{kind}: .*{CASES[name][1]}"):
            raise AssertionError(said)
        assert took < FASTER_THAN_S
        assert after == [-2.0] * len(after)


def same_ranks(rank: int, world_size: int) -> list[float]:
    groups = Groups(rank)
    again = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pair = [made(groups.half), made(again)]
    alone = [made(ALONE), made(ALONE)]
    norms = [zerox.clip_grad_norm_(both, 1.0) for both in (pair, alone)]
    norms += [zerox.clip_grad_norm_(pair, 1.0, group=groups.across) for _ in range(2)]
    return [float(norm) for norm in norms]


def test_other_groups_of_the_same_ranks_have_one_norm() -> None:
    for clipped, alone, *with_group in Once(same_ranks, 4)():
        assert clipped == alone == pytest.approx(4 * 2**0.5)
        assert with_group == pytest.approx([2**0.5, 1.0])  # of what was clipped to 1 before, on two halves
