"""Ranks that read each other's memory: who does, and that nothing else than the time it takes shows it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import bits_of
from tests.bucket_manager.test_twin import compare_scenarios
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.ranks import neighbours
from zerox.ranks.group import find_ranks

# Where ranks run, and what they may do.
ONE_MACHINE, TWO_MACHINES, FORBIDDEN, MESSAGES = "one machine", "two machines", "forbidden on one rank", "messages"
EVERYWHERE = (ONE_MACHINE, TWO_MACHINES, FORBIDDEN, MESSAGES)


@contextmanager
def running(where: str, rank: int) -> Iterator[None]:
    patches: dict[str, Any] = {}
    if where == TWO_MACHINES:
        patches = {"name_of_machine": lambda: f"machine-{rank % 2}"}
    elif where == FORBIDDEN and rank == 0:
        patches = {"_reads": lambda *_: False}
    environment = {"ZEROX_EXCHANGE": "messages"} if where == MESSAGES else {}
    with patch.multiple(neighbours, **patches) if patches else patch.dict(os.environ, environment):
        yield


def who(rank: int, _: int, where: str) -> tuple[int, tuple[int, ...]]:
    with running(where, rank):
        ranks = find_ranks(None)
        dist.barrier()  # a group must not go while others are still connecting
        return os.getpid(), ranks.neighbours.processes


@pytest.mark.parametrize("world_size", [2, 4])
def test_neighbours_are_the_ranks_of_a_machine_or_nobody(world_size: int) -> None:
    def found(where: str) -> tuple[list[int], list[tuple[int, ...]]]:
        pids, them = zip(*run_ranks(who, world_size, where), strict=True)
        return list(pids), list(them)

    pids, them = found(ONE_MACHINE)
    assert len(set(pids)) == world_size
    assert them == [tuple(pids)] * world_size
    pids, them = found(TWO_MACHINES)
    for rank, mine in enumerate(them):
        assert mine == tuple(pid if other % 2 == rank % 2 else 0 for other, pid in enumerate(pids))
    assert found(FORBIDDEN)[1] == [(0,) * world_size] * world_size
    assert found(MESSAGES)[1] == [()] * world_size


def another_number(rank: int, _: int) -> tuple[int, ...]:
    """As if rank 1's process number were some other process' here, which has something else at that address."""
    secret = torch.tensor([4])
    gathered = [f"here {os.getpid()} {secret.data_ptr()} {5 if rank == 1 else 4}"]
    return neighbours.find_neighbours(
        lambda text: gathered if text.startswith(neighbours.name_of_machine()) else [text], 0
    )


def test_a_process_that_does_not_hold_the_secret_is_no_neighbour() -> None:
    with patch.object(neighbours, "name_of_machine", lambda: "here"):
        assert another_number(0, 1) == (os.getpid(),)
        assert another_number(1, 1) == (0,)


def test_an_address_without_memory_is_an_answer_and_no_crash() -> None:
    assert not neighbours.C.read_memory(os.getpid(), 8, torch.empty(1))


def compare_with_twin(rank: int, world_size: int, where: str, stage: int) -> list[str]:
    with running(where, rank):
        return compare_scenarios(rank, world_size, torch.bfloat16, stage)


@pytest.mark.parametrize("where", [TWO_MACHINES, FORBIDDEN, MESSAGES])
@pytest.mark.parametrize("stage", [1, 2])
def test_reduced_gradients_equal_the_twins_bit_for_bit(stage: int, where: str) -> None:
    assert run_ranks(compare_with_twin, 4, where, stage) == [[]] * 4


class Mixed(nn.Module):
    """Shards of many parts, some of which would end inside a block of 256 if they were all of one length."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numels = [300_001, 5_003, 17, *[60_001] * 6, 4_096, 301, 200_003, 1, 4_097]
        generator = torch.Generator().manual_seed(7)
        self.params = nn.ParameterList(torch.randn(n, generator=generator).to(dtype) for n in numels)

    def forward(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return sum((torch.randn(p.numel(), generator=generator).to(p.dtype) * p).sum().float() for p in self.params)


def trained(rank: int, _: int, where: str, dtype: torch.dtype, stage: int, cap: float) -> tuple[list[Tensor], Any]:
    """Parameters and norms of some steps with two backwards each, as bits; and what was sent."""
    model = Mixed(dtype)
    with running(where, rank):
        optimizer = FusedShardedAdam(model.parameters(), lr=0.1, stage=stage, bucket_cap_mb=cap)
    norms = []
    for step in range(3):
        for part in range(2):
            model(rank, 2 * step + part).backward()
        norms.append(optimizer.clip_grad_norm_(1.0))
        # Exact sums show what is lost in the rounding of a norm.
        limbs = [optimizer.inside.grads.limbs(index) for index in range(len(optimizer.inside.buckets))]
        norms += [each.clone() for each in limbs if each is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*map(bits_of, [*model.parameters(), *norms])], optimizer.inside.manager.traffic


# Half of the product: any three of the four choices meet in all ways.
CHOICES = [
    (world_size, dtype, stage, cap)
    for (i, world_size), (j, dtype), (k, stage), (m, cap) in itertools.product(
        *map(enumerate, ((2, 3), (torch.float32, torch.bfloat16), (1, 2), (0.5, 64)))
    )
    if (i + j + k + m) % 2 == 0
]


@pytest.mark.parametrize(("world_size", "dtype", "stage", "cap"), CHOICES, ids=str)
def test_results_do_not_show_how_gradients_and_parameters_travelled(
    world_size: int, dtype: torch.dtype, stage: int, cap: float
) -> None:
    reference, *others = (run_ranks(trained, world_size, where, dtype, stage, cap) for where in EVERYWHERE)
    for other in others:
        for (bits, sent), (expected, counted) in zip(other, reference, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(bits, expected, strict=True))
            assert sent == counted
