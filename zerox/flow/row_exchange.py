"""Moves words between ranks, as many as each likes: by message, or read where they lie in a neighbour's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.row_owners import CPU
from zerox.ranks.group import Ranks


@dataclass
class Traffic:
    """What this rank has sent to others so far, or lent them to read."""

    messages: int = 0
    nbytes: int = 0


class RowExchange:
    """A header of numbers first, then the words that it is about. Collective, in the same order on all ranks.

    If every rank can read every other's memory (ZEROX_EXCHANGE=messages says that none does), the header also says
    where words lie, and they are not sent. ``lent``: what others may be reading. They have read it when they come to
    the next header or message; where none follows at once, close() makes sure of it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.traffic = Traffic()
        self.reads = bool(ranks.neighbours) and all(ranks.neighbours)
        self.lent: Sequence[Tensor] = ()
        self.addresses: list[int] = []  # of what each rank has for this one

    def tell(self, header: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """``header``: int64 ``[W, n]``, a row for each rank; ``parts``: what collect() will give to each. Returns the
        rows that ranks had for this one."""
        size = self.ranks.size
        if size == 1:
            return header
        told = self._swap(self._with_addresses(header, parts) if self.reads else header)
        self.lent = ()
        if self.reads:
            self.lent = parts
            self.addresses = told[:, -1].tolist()
            told = told[:, :-1]
        return told

    def collect(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """By rank: ``sizes`` words that it had for this one. ``parts``: int32, as they were told."""
        if not self.reads:
            return self.send(parts, sizes)
        own = self.ranks.rank
        self._count(sum(part.nbytes for rank, part in enumerate(parts) if rank != own))
        return [parts[own] if rank == own else self._read(rank, n) for rank, n in enumerate(sizes)]

    def send(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The same by message, with no header before."""
        own = self.ranks.rank
        given = [part for rank, part in enumerate(parts) if rank != own]
        if not given:
            return [parts[own]]
        self._count(sum(part.nbytes for part in given))
        sent = [0 if rank == own else part.numel() for rank, part in enumerate(parts)]
        come = [0 if rank == own else n for rank, n in enumerate(sizes)]
        words = given[0] if len(given) == 1 else torch.cat(given)
        found = list(self.ranks.all_to_all(words, sent, come).split(come))
        found[own] = parts[own]
        self.lent = ()
        return found

    def close(self) -> None:
        """Nobody reads here any more."""
        if len(self.lent) > 0:
            self.ranks.all_to_all(
                torch.zeros(self.ranks.size, dtype=torch.uint8, device=CPU),
                [1] * self.ranks.size,
                [1] * self.ranks.size,
            )
            self.lent = ()

    def _swap(self, header: Tensor) -> Tensor:
        size, width = header.shape
        self._count((size - 1) * width * header.element_size())
        return self.ranks.all_to_all(header.reshape(-1), [width] * size, [width] * size).view(size, width)

    @staticmethod
    def _with_addresses(header: Tensor, parts: Sequence[Tensor]) -> Tensor:
        addresses = torch.tensor([[part.data_ptr()] for part in parts], dtype=torch.int64, device=CPU)
        return torch.cat([header, addresses], dim=1)

    def _read(self, rank: int, count: int) -> Tensor:
        found = torch.empty(count, dtype=torch.int32, device=CPU)
        if count and not C.read_memory(self.ranks.neighbours[rank], self.addresses[rank], found):
            raise RuntimeError(f"zerox: rank {rank} is gone: the rows that it had for this rank can't be read any more")
        return found

    def _count(self, nbytes: int) -> None:
        self.traffic.messages += self.ranks.size - 1
        self.traffic.nbytes += nbytes
