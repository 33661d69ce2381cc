"""Rows of tables on an accelerator, on their way: what C.RowFlow (csrc/rows/row_flow.h) does on the host.

Rows stay on the device. torch's coalesce() adds up those of one number, on each rank and then over the ranks in their
order, device_update.py updates what has been reduced, and the ranks' group moves it. Messages have lengths, so the host
learns how many rows there are: it waits for the device once at a sync point, and once more for what has been reduced
from several.

Every bit is that of the host's flow, with one exception: Adam's roots, which torch rounds correctly on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerox._C import RowChange, RowRule
from zerox.memory.row_owners import CPU, places_of_blocks
from zerox.rows.device_messages import DeviceMessages
from zerox.rows.device_table import KeptRows, ReducedRows, Rows, Table
from zerox.rows.device_update import update_rows

INT32 = torch.int32


class DeviceRowFlow:
    """The methods and who may call them are C.RowFlow's."""

    def __init__(self, messages: DeviceMessages) -> None:
        self.messages = messages
        self.tables: list[Table] = []
        self.counts: list[list[int]] = []  # of each table, how many of this rank's rows each owner gets

    @property
    def world(self) -> int:
        return self.messages.ranks.size

    @property
    def reduced(self) -> list[ReducedRows | None]:
        return [table.reduced for table in self.tables]

    def add(
        self,
        *,
        param: Tensor,
        number: int,
        of_block: Tensor,
        states: Sequence[Tensor],
        scales: Sequence[Tensor],
        master: Tensor | None,
        step: Tensor,
        divisor: float,
        own: Tensor | None,
    ) -> None:
        device = param.device
        divided = None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32, device=device)
        places, owned = places_of_blocks(of_block, param.shape[0], self.world)
        kept = KeptRows(number, states, scales, master, step, own)
        self.tables.append(Table(param, kept, of_block.to(device).long(), places.to(device), owned, divided))

    # ---- this rank's rows

    def _change(self) -> RowChange:
        return max((table.change() for table in self.tables), key=lambda change: change.value)

    def pack(self) -> bool:
        """Adds up this rank's rows, and sorts them by owner, unless nothing has changed. False: some gradient is not of
        rows, or of rows that its table does not have."""
        if self._change() == RowChange.UNCHANGED:
            return True
        found = [(table, grad) for table in self.tables if (grad := table.gradient()) is not None]
        if len(found) < len(self.tables):
            return False
        told = []
        for table, grad in found:
            told.append(grad.rows[:: max(1, grad.rows.numel() - 1)])  # the first and the last
            table.parts = [grad]
            if self.world > 1:
                owners, order = torch.sort(table.owners_of(grad.rows), stable=True)
                table.parts = [Rows(grad.rows[order], grad.values[order])]
                told.append(torch.searchsorted(owners, torch.arange(self.world, device=owners.device), right=True))
        numbers = iter(torch.cat(told).tolist())  # waits for the device
        counts = []
        for table, grad in found:
            numel = grad.rows.numel()
            if any(not 0 <= number < table.num_rows for number in itertools.islice(numbers, min(numel, 2))):
                return False
            ends = list(itertools.islice(numbers, self.world)) if self.world > 1 else [numel]
            counts.append([stop - start for start, stop in zip([0, *ends[:-1]], ends, strict=True)])
        self.counts = counts
        if self.world > 1:
            for table, numels in zip(self.tables, counts, strict=True):
                [(rows, values)] = table.parts
                table.parts = [Rows(*each) for each in zip(rows.split(numels), values.split(numels), strict=True)]
        return True

    def forget(self) -> None:
        """p.grad was zeroed or taken away: what was reduced is of another gradient."""
        for table in self.tables:
            table.seen = table.reduced = None

    def note_seen(self) -> None:
        for table in self.tables:
            table.note_seen()

    # ---- the mean

    def header(self) -> list[int]:
        """See C.RowFlow.header()."""
        if len(self.counts) != len(self.tables):  # a table is new
            self.counts = [[0] * self.world for _ in self.tables]
        present = [int(table.param.grad is not None) for table in self.tables]
        return [self._change().value, *present, *(count for counts in self.counts for count in counts)]

    def exchange(self, headers: Sequence[int], goes_on: bool) -> RowChange:
        """See C.RowFlow.exchange()."""
        if not self.tables:
            return RowChange.UNCHANGED
        told = self._by_rank(headers) if headers else self._tell()
        least, most = min(each[0] for each in told), max(each[0] for each in told)
        if most != RowChange.UNCHANGED.value:
            if least == RowChange.UNCHANGED.value:  # a rank has not packed what it has
                if self._change() == RowChange.UNCHANGED:
                    for table in self.tables:
                        table.seen = None
                    assert self.pack()
                told = self._tell()
            self._reduce(told)
            self.note_seen()
        for table in self.tables:
            table.parts = ()
        return RowChange(most)

    def _tell(self) -> list[list[int]]:
        return [each.tolist() for each in self.messages.to_all(torch.tensor(self.header(), device=CPU))]

    def _by_rank(self, headers: Sequence[int]) -> list[list[int]]:
        size = len(headers) // self.world
        return [list(headers[rank * size : (rank + 1) * size]) for rank in range(self.world)]

    def _reduce(self, told: Sequence[Sequence[int]]) -> None:
        num_tables, own = len(self.tables), self.messages.ranks.rank
        sizes: list[list[Size]] = [[] for _ in told]  # by rank, of what it has for this one
        for t, table in enumerate(self.tables):
            first = 1 + num_tables + t * self.world
            of_ranks = [numbers[first : first + self.world] for numbers in told]
            for size, counts in zip(sizes, of_ranks, strict=True):
                size.append(Size(counts[own], table.width, torch.float32))
            table.most = [min(sum(sent), owned) for *sent, owned in zip(*of_ranks, table.owned, strict=True)]
        received = [[table.parts[own] for table in self.tables]]
        if self.world > 1:
            to_each = [as_words([table.parts[owner] for table in self.tables]) for owner in range(self.world)]
            received = self._swap(to_each, sizes)
        for t, table in enumerate(self.tables):
            table.reduced = None
            if any(numbers[1 + t] for numbers in told):
                table.reduce([of_rank[t] for of_rank in received])

    def _swap(self, to_each: Sequence[Tensor], sizes: Sequence[Sequence[Size]]) -> list[list[Rows]]:
        """``to_each``: a message for each rank. ``sizes``: of the rows that come from each rank, by table."""
        received = self.messages.swap(to_each, [sum(size.words for size in each) for each in sizes])
        return [list(from_words(of_rank, each)) for of_rank, each in zip(received, sizes, strict=True)]

    # ---- step()

    def update(self, rules: Sequence[RowRule]) -> None:
        """See C.RowFlow.update()."""
        touched = []
        for table, rule in zip(self.tables, rules, strict=True):
            if (reduced := table.reduced) is None:
                continue
            update_rows(table, reduced, rule)
            touched.append((table, reduced.rows))
        whole = [(table, rows) for table, rows in touched if table.kept.own is None]
        if whole and self.world > 1:
            self._publish(whole)
        for table, _ in touched:
            torch.autograd.graph.increment_version(table.param)

    def _publish(self, touched: Sequence[tuple[Table, Tensor]]) -> None:
        """``touched``: tables, and which rows this rank has updated. Ranks know how many rows were sent to each owner,
        and not how many different ones: messages are as long as they could be, and filled with their first row."""
        own = self.messages.ranks.rank
        sizes = [
            [Size(table.most[rank], table.width, table.param.dtype) for table, _ in touched]
            for rank in range(self.world)
        ]
        sent = []
        for table, updated in touched:
            rows = torch.cat([updated, updated[:1].expand(table.most[own] - updated.numel())])
            sent.append(Rows(rows, table.param.detach()[rows]))
        received = self._swap([as_words(sent)] * self.world, sizes)
        for rank, of_rank in enumerate(received):
            for (table, _), (rows, values) in zip(touched, of_rank, strict=True):
                if rank != own and rows.numel():
                    table.write(rows, values)

    def close(self) -> None:
        """Nobody reads another rank's memory."""


class Size(NamedTuple):
    """Of some rows in a message: how many, and what their values are."""

    num_rows: int
    width: int
    dtype: torch.dtype

    @property
    def value_words(self) -> int:
        """In int32, the last one filled up."""
        return -(-self.num_rows * self.width * self.dtype.itemsize // INT32.itemsize)

    @property
    def words(self) -> int:
        return self.num_rows + self.value_words


def as_words(rows: Sequence[Rows]) -> Tensor:
    """One message of several tables' rows: of each its numbers, as int32, and its values."""
    found = []
    for numbers, values in rows:
        flat = values.reshape(-1)
        if flat.nbytes % INT32.itemsize:
            flat = torch.cat([flat, flat.new_zeros(1)])
        found += [numbers.int(), flat.view(INT32)]
    return torch.cat(found)


def from_words(words: Tensor, sizes: Sequence[Size]) -> Iterator[Rows]:
    parts = iter(words.split([numel for size in sizes for numel in (size.num_rows, size.value_words)]))
    for size, numbers, values in zip(sizes, parts, parts, strict=True):
        numel = size.num_rows * size.width
        yield Rows(numbers.long(), values.view(size.dtype)[:numel].view(size.num_rows, size.width))
