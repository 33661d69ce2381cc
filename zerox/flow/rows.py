"""Gradients that are rows of a table: from p.grad to the ranks that own them, and updated rows back to all.

Note [Rows travel by themselves]
A module with sparse=True names the rows of its table that a batch touches; the others have no gradient, not one of
zero. So a table is in no bucket, and no hook watches it: p.grad keeps this rank's rows, over as many backwards as there
are, inside no_sync() and outside. Where ranks meet to read the mean (step(), a norm, a scaler), each adds up its rows
of the same number, and sends numbers and values to the rows' owners (zerox/memory/row_owners.py), which add them in
rank order and divide once. So the mean has the bits that one process gets if it adds up the ranks' gradients in order.

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

from zerox import ops
from zerox.flow.grad_scale import Divisor, GradScale
from zerox.flow.norm import shard_words
from zerox.flow.row_exchange import RowExchange
from zerox.flow.row_gradient import UNCHANGED, Landed, TableGrad
from zerox.memory.bucket import Member
from zerox.memory.row_owners import CPU, RowOwners
from zerox.memory.row_table import RowTable, check_group, is_sparse
from zerox.ranks.group import Ranks

Groups = Sequence[Mapping[str, Any]]
Numbered = tuple[Tensor, Tensor]  # rows [n] and their values [n, D]
NOTHING = torch.empty(0, dtype=torch.int32, device=CPU)


class Rows:
    """The tables of an optimizer. ``shows_mean``: p.grad becomes the mean over the ranks, as in stage 1."""

    def __init__(self, ranks: Ranks, shows_mean: bool) -> None:
        self.ranks = ranks
        self.shows_mean = shows_mean
        self.each: list[TableGrad] = []
        self.wire = RowExchange(ranks)
        self.most: list[list[int]] = []  # rows that each owner has of each table, if no two ranks touched the same

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
                self.each.append(TableGrad(table, divisors[member.group]))
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

    def refusal(self) -> str:
        """Adds up this rank's rows. Why they can't be exchanged, naming the parameter; empty if they can."""
        return next(filter(None, [each.sum_up() for each in self.each]), "")

    def exchange(self, goes_on: bool) -> int:
        """Has the mean land with the owners, unless it is there. Returns what happened to gradients. Collective.

        ``goes_on``: update() follows.
        """
        if not self.each:
            return UNCHANGED
        for each in self.each:
            each.deal(self.ranks.size)
        own = max(each.change for each in self.each)
        parts = self._parts() if own != UNCHANGED else [NOTHING] * self.ranks.size
        told = self.wire.tell(self._header(own), parts)
        change = int(told[:, 0].max())
        if change != UNCHANGED and int(told[:, 0].min()) == UNCHANGED:  # a rank has not said where its rows lie
            parts = self._parts()
            told = self.wire.tell(self._header(own), parts)
        if change != UNCHANGED:
            self._land(told, parts)
        if not goes_on:
            self.wire.close()
        return change

    def _header(self, change: int) -> Tensor:
        """The same for every rank: what has changed, and of each table whether there is a gradient, and how many rows
        each owner gets."""
        present = torch.tensor([change, *(each.is_present for each in self.each)], dtype=torch.int64, device=CPU)
        return torch.cat([present, *(each.counts for each in self.each)]).expand(self.ranks.size, -1)

    def _parts(self) -> list[Tensor]:
        """By owner: the words of all tables, one after the other."""
        words = [each.words_by_owner(self.ranks.size) for each in self.each]
        return words[0] if len(words) == 1 else [torch.cat(of_owner) for of_owner in zip(*words, strict=True)]

    def _land(self, told: Tensor, parts: Sequence[Tensor]) -> None:
        """``told``: by rank, as _header()."""
        num_tables, size = len(self.each), self.ranks.size
        present = told[:, 1 : 1 + num_tables].amax(0).bool().tolist()
        by_owner = told[:, 1 + num_tables :].view(size, num_tables, size)
        self.most = by_owner.sum(0).T.tolist()
        counts = by_owner[:, :, self.ranks.rank].tolist()
        widths = [each.table.width for each in self.each]
        everyones = self._collected(parts, counts, widths)
        for index, each in enumerate(self.each):
            each.landed = None
            if present[index]:
                each.land([of_rank[index] for of_rank in everyones], self.ranks.size)
        for index, each in enumerate(self.each):
            if self.shows_mean:
                each.show(self._of_all_ranks(index) if present[index] else None)
            each.note_seen()

    def _collected(
        self, parts: Sequence[Tensor], counts: Sequence[Sequence[int]], widths: Sequence[int]
    ) -> list[list[Numbered]]:
        """By rank and table."""
        sizes = [[n * (1 + width) for n, width in zip(row, widths, strict=True)] for row in counts]
        received = self.wire.collect(parts, [sum(row) for row in sizes])
        return [
            [_numbered(words, n, width) for words, n, width in zip(of_rank.split(size), row, widths, strict=True)]
            for of_rank, size, row in zip(received, sizes, counts, strict=True)
        ]

    def _of_all_ranks(self, index: int) -> list[Numbered]:
        landed = self.each[index].landed
        assert landed is not None
        return self._to_all([(landed.rows, landed.values)])[0]

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
        landed = [(each, each.landed) for each in self.each if each.landed is not None]
        if not landed or (scale.finite is not None and not bool(scale.finite)):
            self.wire.close()
            return
        updated = [
            (found.rows, _updated(each, found, groups[each.table.member.group], scale)) for each, found in landed
        ]
        if self.ranks.size > 1:
            tables = [each.table for each, _ in landed]
            most = [[row[index] for index, each in enumerate(self.each) if each.landed] for row in self.most]
            for rank, parts in enumerate(self._bounded_to_all(updated, most)):
                for table, (rows, values) in zip(tables, parts, strict=True):
                    if rank != self.ranks.rank:
                        ops.put_rows_(table.param.detach(), rows, values)
        torch.autograd.graph.increment_version([each.table.param for each, _ in landed])

    # ---- messages

    def _bounded_to_all(self, own: Sequence[Numbered], most: Sequence[Sequence[int]]) -> list[list[Numbered]]:
        """By rank and table, every rank's rows, which are ``most`` at most. Collective.

        In one message, which is as long as it could be: to tell ranks how long it is would take as much time again, and
        few rows are touched by several ranks.
        """
        widths = [values.shape[1] for _, values in own]
        sizes = [len(own) + sum(n * (1 + w) for n, w in zip(row, widths, strict=True)) for row in most]
        counts = torch.tensor([rows.numel() for rows, _ in own], dtype=torch.int32, device=CPU)
        parts = [each for rows, values in own for each in (rows.int(), values.reshape(-1).view(torch.int32))]
        rest = sizes[self.ranks.rank] - len(own) - sum(part.numel() for part in parts)
        words = torch.cat([counts, *parts, torch.zeros(rest, dtype=torch.int32, device=CPU)])
        found = []
        for received in self.wire.send([words] * self.ranks.size, sizes):
            numbers = received[: len(own)].tolist()
            lengths = [n * (1 + w) for n, w in zip(numbers, widths, strict=True)]
            tables = received[len(own) : len(own) + sum(lengths)].split(lengths)
            found.append([_numbered(*each) for each in zip(tables, numbers, widths, strict=True)])
        return found

    def _to_all(self, own: Sequence[Numbered]) -> list[list[Numbered]]:
        """By table, every rank's rows. Collective."""
        size = self.ranks.size
        if size == 1:
            return [[numbered] for numbered in own]
        header = torch.tensor([[rows.numel() for rows, _ in own]] * size, dtype=torch.int64, device=CPU)
        words = torch.cat([each for rows, values in own for each in (rows.int(), values.reshape(-1).view(torch.int32))])
        counts = self.wire.tell(header, [words] * size).tolist()
        everyones = self._collected([words] * size, counts, [values.shape[1] for _, values in own])
        return [list(of_table) for of_table in zip(*everyones, strict=True)]


def _updated(each: TableGrad, landed: Landed, group: Mapping[str, Any], scale: GradScale) -> Tensor:
    """Updates the rows that landed here; returns their new values."""
    table = each.table
    table.step += 1
    factor = scale.values.get(each.divisor)
    values, by = landed.values, 1.0 if factor is None else float(factor)
    if scale.requested.limit is not None:
        values, by = (values * by).clamp_(-scale.requested.limit, scale.requested.limit), 1.0
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = ops.RowStep(
        float(group["lr"]), beta1, beta2, float(group["eps"]), int(table.step), bool(group.get("maximize", False))
    )
    updated = torch.empty_like(values)
    ops.adam_rows_(table.tensors, updated, ops.RowGrad(landed.rows, landed.places, values, by), step)
    return updated


def _numbered(words: Tensor, count: int, width: int) -> Numbered:
    return words[:count], words[count:].view(torch.float32).view(count, width)
