"""Which rank owns which rows of a table: blocks of 64 rows, dealt in the order of a hash.

Vocabularies are often sorted by frequency: contiguous ranges would give one rank all the rows that every batch touches.
The order in which blocks are dealt is the same at every number of ranks, and each rank gets as many as any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerox.plan.plan import BLOCK_ROWS

CPU = torch.device("cpu")
SEED = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # splitmix64's


class RowOwners:
    """``[0, num_rows)`` over ``world_size`` ranks. ``number``: the table's, so that small ones begin at other ranks.

    A rank keeps the rows that it owns in ascending order; one rank alone has each row at its own place.
    """

    def __init__(self, num_rows: int, world_size: int, number: int = 0) -> None:
        self.num_rows = num_rows
        self.world_size = world_size
        num_blocks = -(-num_rows // BLOCK_ROWS)
        order = torch.argsort(_hash(torch.arange(num_blocks, device=CPU)), stable=True)
        self.of_block = torch.empty(num_blocks, dtype=torch.int32, device=CPU)
        self.of_block[order] = (
            torch.arange(num_blocks, dtype=torch.int32, device=CPU) + number % world_size
        ) % world_size
        self.places, _ = places_of_blocks(self.of_block, num_rows, world_size)

    def rows_of(self, rank: int) -> Tensor:
        """int64, ascending: the row at each place of the rank's."""
        inside = torch.arange(BLOCK_ROWS, device=CPU)
        rows = ((self.of_block == rank).nonzero() * BLOCK_ROWS + inside).reshape(-1)
        return rows[rows < self.num_rows]

    def places_of(self, rows: Tensor) -> Tensor:
        """Where the owner of each of these rows keeps it."""
        return self.places[rows // BLOCK_ROWS] + rows % BLOCK_ROWS


def places_of_blocks(of_block: Tensor, num_rows: int, world_size: int) -> tuple[Tensor, list[int]]:
    """Where each block's first row is among its owner's rows (int64), and how many rows each rank owns. Only the last
    block may be short, and it is the last of its owner's."""
    places = torch.empty(of_block.numel(), dtype=torch.int64, device=CPU)
    owned = []
    for rank in range(world_size):
        blocks = (of_block == rank).nonzero()[:, 0]
        places[blocks] = torch.arange(blocks.numel(), device=CPU) * BLOCK_ROWS
        has_last = bool(blocks.numel()) and int(blocks[-1]) == of_block.numel() - 1
        owned.append(blocks.numel() * BLOCK_ROWS - has_last * (of_block.numel() * BLOCK_ROWS - num_rows))
    return places, owned


def _hash(numbers: Tensor) -> Tensor:
    """In int64, which wraps around as uint64 does."""
    found = (numbers + 1) * _to_signed(SEED)
    for shift, factor in ROUNDS:
        high = (found >> shift) & ((1 << (64 - shift)) - 1)  # >> copies the sign
        found = (found ^ high) * _to_signed(factor)
    return found


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
