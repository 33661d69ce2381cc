"""What tables send, or lend to neighbours, in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.memory.row_owners import BLOCK_ROWS

ROWS, WIDTH = 1000, 6
NUMBER = VALUE = 4  # bytes
HEADER = ADDRESS = 8


def touched(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, ROWS, (40,), generator=generator)


def step(rank: int, size: int, stage: int, exchange: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROX_EXCHANGE", exchange)
        return counted(rank, size, stage)


def counted(rank: int, size: int, stage: int) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = FusedShardedAdam([{"params": table.parameters(), "sparse": True, "weight_decay": 0.0}], stage=stage)
    owners = optimizer.inside.tables[0].owners
    of_block = owners.of_block.tolist()
    table(touched(rank)).sum().backward()
    counts = []
    traffic = optimizer.inside.calls.row_grads.wire.traffic
    for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        before = traffic.messages, traffic.nbytes
        call()
        counts.append((traffic.messages - before[0], traffic.nbytes - before[1]))
    return of_block, counts, optimizer.inside.calls.row_grads.wire.reads, table.weight.detach()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_are_those_of_the_closed_form(size: int, stage: int) -> None:
    by_message = run_ranks(step, size, stage, "messages")
    read = run_ranks(step, size, stage, "direct")
    check(size, stage, by_message, 0)
    check(size, stage, read, ADDRESS)
    assert not by_message[0][2]
    assert read[0][2] is (size > 1)
    assert all(torch.equal(one[3], by_message[0][3]) for one in (*by_message, *read))


def check(size: int, stage: int, results: list[Any], address: int) -> None:
    others = size - 1
    of_block = results[0][0]
    everyones = [set(touched(rank).tolist()) for rank in range(size)]
    union = set().union(*everyones)
    row = NUMBER + WIDTH * VALUE
    for rank, (_, (clip, update), *_) in enumerate(results):
        own = [of_block[number // BLOCK_ROWS] == rank for number in range(ROWS)]
        foreign = sum(not own[number] for number in everyones[rank])
        landed = sum(own[number] for number in union)
        sent_here = sum(own[number] for touched_there in everyones for number in touched_there)
        header = others * ((2 + size) * HEADER + address)  # has it changed, is it present, how many rows for each owner
        to_owners = foreign * row + header
        to_all = others * (landed * row + HEADER + address)
        updated = others * (sent_here * row + NUMBER)
        assert clip[1] == to_owners + (to_all if stage == 1 else 0)
        assert update[1] == header + updated, "step() after a clip sends no gradient again"
