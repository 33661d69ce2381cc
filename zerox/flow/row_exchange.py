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
        self.messages = C.PeerMessages(ranks.control, ranks.whereabouts)
        self.reads = bool(ranks.neighbours) and all(ranks.neighbours)
        self.lent: Sequence[Tensor] = ()
        self.addresses: list[int] = []  # of what each rank has for all others

    def tell(self, header: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """``header``: int64 ``[n]``; ``parts``: by rank what collect() will give to it, one after the other in
        memory, from the beginning of a storage. Returns all ranks' headers, ``[W, n]``."""
        size, width = self.ranks.size, header.numel()
        if size == 1:
            return header[None]
        if self.reads:
            address = parts[0].untyped_storage().data_ptr()  # a part may be empty, and has none then
            header = torch.cat([header, header.new_tensor([address])])
        told = torch.stack(self._swap([header] * size, [header.numel()] * size))
        self.lent = ()
        if self.reads:
            self.lent = parts
            self.addresses = told[:, width].tolist()
        return told[:, :width]

    def collect(self, parts: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """By rank the words that it had for this one: where they begin among its words, and how many there are.
        ``parts``: int32, as they were told."""
        if not self.reads:
            return self.send(parts, [count for _, count in spans])
        own = self.ranks.rank
        self._count(sum(part.nbytes for rank, part in enumerate(parts) if rank != own))
        return [parts[own] if rank == own else self._read(rank, *span) for rank, span in enumerate(spans)]

    def send(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The same by message, with no header before."""
        found = self._swap(parts, sizes)
        self.lent = ()
        return found

    def close(self) -> None:
        """Nobody reads here any more."""
        if len(self.lent) > 0:
            size = self.ranks.size
            self.messages.swap([torch.zeros(1, dtype=torch.uint8, device=CPU)] * size, [1] * size)
            self.lent = ()

    def _swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if self.ranks.size > 1:
            self._count(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.ranks.rank))
        return self.messages.swap(parts, sizes)

    def _read(self, rank: int, start: int, count: int) -> Tensor:
        found = torch.empty(count, dtype=torch.int32, device=CPU)
        address = self.addresses[rank] + start * found.element_size()
        if count and not C.read_memory(self.ranks.neighbours[rank], address, found):
            raise RuntimeError(f"zerox: rank {rank} is gone: the rows that it had for this rank can't be read any more")
        return found

    def _count(self, nbytes: int) -> None:
        self.traffic.messages += self.ranks.size - 1
        self.traffic.nbytes += nbytes
