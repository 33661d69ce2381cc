"""Gradients that are rows of a table: from p.grad to the ranks that own them, and updated rows back to all.

Note [Rows travel by themselves]
A module with sparse=True names the rows of its table that a batch touches; the others have no gradient, not one of
zero. So a table is in no bucket, and no hook watches it: p.grad keeps this rank's rows, over as many backwards as there
are, inside no_sync() and outside. Where ranks meet to read the mean (step(), a norm, a scaler), each adds up its rows
of the same number, and sends numbers and values to the rows' owners (zerox/memory/row_owners.py), which add them in
rank order and divide once (csrc/rows). So the mean has the bits that one process gets if it adds up the ranks'
gradients in order.

What is exchanged stays valid while no rank's p.grad changes: a clip and the step() after it exchange once. Each rank
says in the header of every exchange whether its own has changed; if one has, all send what they have again.

The owner updates its rows by the lazy rule of torch.optim.SparseAdam: moments of untouched rows stay, a row whose
gradients cancel counts as touched. Then updated rows go to all ranks, in whose tables they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox import _C as C
from zerox import ops
from zerox.flow.grad_scale import Divisor, GradScale
from zerox.flow.norm import shard_words
from zerox.flow.row_exchange import RowExchange
from zerox.flow.row_gradient import UNCHANGED, TableGrad
from zerox.memory.bucket import Member
from zerox.memory.row_owners import CPU, RowOwners
from zerox.memory.row_table import RowTable, check_group, is_sparse
from zerox.ranks.group import Ranks

Groups = Sequence[Mapping[str, Any]]
NOTHING = torch.empty(0, dtype=torch.int32, device=CPU)


class Rows:
    """The tables of an optimizer. ``shows_mean``: p.grad becomes the mean over the ranks, as in stage 1.

    ``parts``: this rank's rows, packed for each owner; ``counts``: how many of each table each owner gets,
    ``[tables, W]``; ``everyones``: the same of all ranks, of what has landed.
    """

    def __init__(self, ranks: Ranks, shows_mean: bool) -> None:
        self.ranks = ranks
        self.shows_mean = shows_mean
        self.each: list[TableGrad] = []
        self.inside = C.RowTables(ranks.rank, ranks.size)
        self.wire = RowExchange(ranks)
        self.parts: Sequence[Tensor] = ()
        self.counts = self.everyones = torch.empty(0, dtype=torch.int64, device=CPU)

    @property
    def tables(self) -> list[RowTable]:
        return [each.table for each in self.each]

    @property
    def divisors(self) -> list[Divisor]:
        return [each.divisor for each in self.each]

    def take(self, members: Sequence[Member], groups: Groups, divisors: Sequence[Divisor]) -> list[Member]:
        """Makes tables of those in sparse groups, with rank 0's values. Returns the others. Collective."""
        for member in members:
            if is_sparse(groups[member.group]):
                self.ranks.broadcast_values(member.param, f"parameter '{member.name}'")
                owners = RowOwners(member.param.shape[0], self.ranks.size, member.number)
                table = RowTable(member, owners, self.ranks.rank)
                divisor = divisors[member.group]
                table.add_to(self.inside, self.ranks.size if divisor is None else divisor)
                self.each.append(TableGrad(table, divisor))
        return [member for member in members if not is_sparse(groups[member.group])]

    def zero(self) -> None:
        """p.grad was zeroed or taken away."""
        for each in self.each:
            each.forget()

    def tensors(self) -> Iterator[Tensor]:
        """What is kept of gradients: this rank's rows, and the mean of those that it owns."""
        for each in self.each:
            yield from each.tensors()

    # ---- the mean

    @property
    def change(self) -> int:
        """What happened to this rank's gradients since ranks last exchanged them."""
        return max(each.change for each in self.each)

    def refusal(self) -> str:
        """Packs this rank's rows, if they have changed. Why they can't be exchanged, naming the parameter; empty if
        they can."""
        return "" if self.change == UNCHANGED else self._pack()

    def _pack(self) -> str:
        if why := next(filter(None, [each.refusal() for each in self.each]), ""):
            return why
        try:
            packed = self.inside.pack([each.local() for each in self.each])
        except IndexError:
            return next(filter(None, [each.refusal_of_numbers() for each in self.each]))
        self.parts, self.counts = packed.words, packed.counts
        return ""

    def exchange(self, goes_on: bool) -> int:
        """Has the mean land with the owners, unless it is there. Returns what happened to gradients. Collective.

        ``goes_on``: update() follows.
        """
        if not self.each:
            return UNCHANGED
        own = self.change
        told = self._tell(own)
        change = int(told[:, 0].max())
        if change != UNCHANGED and int(told[:, 0].min()) == UNCHANGED:  # a rank has not said where its rows lie
            if own == UNCHANGED:
                self._pack()
            told = self._tell(own)
        if change != UNCHANGED:
            self._land(told)
        self.parts = ()
        if not goes_on:
            self.wire.close()
        return change

    def _tell(self, change: int) -> Tensor:
        """By rank: what has changed, of each table whether there is a gradient, and how many rows each owner gets."""
        present = torch.tensor([change, *(each.is_present for each in self.each)], dtype=torch.int64, device=CPU)
        return self.wire.tell(torch.cat([present, self.counts.view(-1)]), self.parts or [NOTHING] * self.ranks.size)

    def _land(self, told: Tensor) -> None:
        first = 1 + len(self.each)
        present = told[:, 1:first].amax(0).tolist()
        self.everyones = told[:, first:].contiguous()
        words = self.wire.collect(self.parts, self.inside.words_from_each(self.everyones))
        landed = self.inside.land(words, self.everyones)
        for each, found, is_present in zip(self.each, landed, present, strict=True):
            each.landed = found if is_present else None
            if self.shows_mean and is_present:
                each.show(self._of_all_ranks(found))
            each.note_seen()

    def _of_all_ranks(self, own: C.LandedRows) -> list[tuple[Tensor, Tensor]]:
        """By rank, what has landed there of one table. Collective."""
        size = self.ranks.size
        count, width = own.values.shape
        header = torch.tensor([count], dtype=torch.int64, device=CPU)
        counts = [int(each) for each in self.wire.tell(header, [NOTHING] * size)[:, 0]]
        words = torch.cat([own.rows.int(), own.values.view(-1).view(torch.int32)])
        received = self.wire.send([words] * size, [n * (1 + width) for n in counts])
        return [
            (of[:n].long(), of[n:].view(torch.float32).view(n, width)) for of, n in zip(received, counts, strict=True)
        ]

    def words(self, p: float) -> Iterator[tuple[Divisor, Tensor]]:
        """The exact sums for norms, of the rows that landed here. One segment a row: no number of ranks shows."""
        for each in self.each:
            if each.landed is not None and each.landed.rows.numel() > 0:
                count, width = each.landed.values.shape
                segments = torch.zeros(count, ops.SEGMENT_COLUMNS, dtype=torch.int64, device=CPU)
                segments[:, 0] = torch.arange(count, device=CPU) * width
                segments[:, 1] = segments[:, 0] + width
                yield each.divisor, shard_words(each.landed.values.view(-1), segments, p)

    def multiply(self, factors: Mapping[Divisor, Tensor]) -> None:
        """The mean, at once, where p.grad shows it."""
        for each in self.each:
            if each.divisor in factors and each.landed is not None:
                each.multiply(factors[each.divisor])

    # ---- step()

    def update(self, groups: Groups, scale: GradScale) -> None:
        """Updates the rows that this rank owns, and writes those that others have updated. Collective."""
        for table in self.tables:
            check_group(groups[table.member.group], f"param group {table.member.group}")
        present = [each.landed is not None for each in self.each]
        if not any(present) or (scale.finite is not None and not bool(scale.finite)):
            self.wire.close()
            return
        params = [table.param.detach() for table in self.tables]
        found = [each.step(groups[each.table.member.group], scale) if each.landed else None for each in self.each]
        words = self.inside.update(params, found, self.everyones)
        if self.ranks.size > 1:
            sizes = self.inside.updated_words(present, self.everyones)
            received = self.wire.send([words] * self.ranks.size, sizes)
            self.inside.put(params, present, self.everyones, received)
        torch.autograd.graph.increment_version([each.table.param for each in self.each if each.landed])
