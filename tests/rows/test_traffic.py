"""What tables send, or lend to neighbours, in closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.plan.plan import BLOCK_ROWS

ROWS, WIDTH = 1000, 7
NUMBER = VALUE = 4  # bytes
COUNT = 8
HOW_MANY = ("none", "few", "some", "all")


def touched(rank: int, how_many: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    few = torch.randint(0, ROWS, (40,), generator=generator)
    return {"none": few[:0], "few": few[:5], "some": few, "all": torch.arange(ROWS)}[how_many]


def step(rank: int, size: int, stage: int, exchange: str, dtype: torch.dtype) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROX_EXCHANGE", exchange)
        return {how_many: counted(rank, size, stage, how_many, dtype) for how_many in HOW_MANY}


def counted(rank: int, size: int, stage: int, how_many: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
    optimizer = FusedShardedAdam([{"params": table.parameters(), "sparse": True, "weight_decay": 0.0}], stage=stage)
    owners = optimizer.inside.tables[0].owners
    of_block = owners.of_block.tolist()
    table(touched(rank, how_many)).sum().backward()
    counts = []
    messages = optimizer.inside.calls.row_grads.messages
    for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        before = messages.traffic
        call()
        counts.append(messages.traffic[1] - before[1])
    return of_block, counts, optimizer.inside.calls.row_grads.reads, table.weight.detach().clone()


SIZES = [
    *((stage, size, torch.float32) for stage in (1, 2) for size in (1, 2, 3, 4)),
    (3, 3, torch.float32),
    *((stage, 3, torch.bfloat16) for stage in (1, 2, 3)),
    (2, 2, torch.float16),
]


@pytest.mark.parametrize(("stage", "size", "dtype"), SIZES)
def test_bytes_are_those_of_the_closed_form(size: int, stage: int, dtype: torch.dtype) -> None:
    """Gradients travel in float32, updated rows in the table's dtype."""
    by_message = run_ranks(step, size, stage, "messages", dtype)
    read = run_ranks(step, size, stage, "direct", dtype)
    for how_many in HOW_MANY:
        sent, lent = ([of_rank[how_many] for of_rank in results] for results in (by_message, read))
        check(size, stage, how_many, sent, lends=False, itemsize=dtype.itemsize)
        check(size, stage, how_many, lent, lends=size > 1, itemsize=dtype.itemsize)
        assert not sent[0][2]
        assert lent[0][2] is (size > 1)
        assert all(torch.equal(one[3], sent[0][3]) for one in (*sent, *lent))


def named(count: int, owned: int, itemsize: int = VALUE) -> int:
    """Bytes for so many rows: a number for each, or a bit for each row of the owner's; and the values, in words of 4
    bytes."""
    return NUMBER * (min(count, math.ceil(owned / 32)) + math.ceil(count * WIDTH * itemsize / NUMBER))


def check(size: int, stage: int, how_many: str, results: list[Any], lends: bool, itemsize: int) -> None:
    others = size - 1
    of_block = results[0][0]
    everyones = [set(touched(rank, how_many).tolist()) for rank in range(size)]
    union = set().union(*everyones)
    row = NUMBER + WIDTH * VALUE
    own = [{number for number in range(ROWS) if of_block[number // BLOCK_ROWS] == rank} for rank in range(size)]
    for rank, (_, (clip, update), *_) in enumerate(results):
        reduced = len(own[rank] & union)
        most = min(sum(len(own[rank] & touched_there) for touched_there in everyones), len(own[rank]))
        foreign = [owner for owner in range(size) if owner != rank]
        to_owners = sum(named(len(own[owner] & everyones[rank]), len(own[owner])) for owner in foreign)
        to_all = others * (reduced * row + COUNT)
        has_read = others if lends else 0  # where no step() follows, a byte
        updated = others * (NUMBER + named(most, len(own[rank]), itemsize))
        assert clip == to_owners + has_read + (to_all if stage == 1 else 0)
        assert update == (0 if stage == 3 else updated), "step() after a clip sends no gradient again"
        if how_many == "all":  # as a reduce-scatter and an all-gather, but for a bit a row, and counts
            dense = sum(len(own[owner]) for owner in foreign) + others * len(own[rank])
            assert to_owners + updated <= dense * WIDTH * VALUE + 2 * others * (ROWS / 8 + NUMBER)
