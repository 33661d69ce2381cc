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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox import ops
from zerox.flow.grad_scale import Divisor, GradScale
from zerox.flow.norm import shard_words
from zerox.flow.row_gradient import UNCHANGED, Landed, TableGrad
from zerox.memory.bucket import Member
from zerox.memory.row_owners import CPU, RowOwners
from zerox.memory.row_table import RowTable, check_group, is_sparse
from zerox.ranks.group import Ranks

Groups = Sequence[Mapping[str, Any]]
Numbered = tuple[Tensor, Tensor]  # rows [n] and their values [n, D]


@dataclass
class Traffic:
    """What this rank has sent to others so far, in exchanges of rows."""

    messages: int = 0
    nbytes: int = 0


class Rows:
    """The tables of an optimizer. ``shows_mean``: p.grad becomes the mean over the ranks, as in stage 1."""

    def __init__(self, ranks: Ranks, shows_mean: bool) -> None:
        self.ranks = ranks
        self.shows_mean = shows_mean
        self.each: list[TableGrad] = []
        self.traffic = Traffic()

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

    # ---- the mean

    def refusal(self) -> str:
        """Adds up this rank's rows. Why they can't be exchanged, naming the parameter; empty if they can."""
        return next(filter(None, [each.sum_up() for each in self.each]), "")

    def exchange(self) -> int:
        """Has the mean land with the owners, unless it is there. Returns what happened to gradients. Collective."""
        if not self.each:
            return UNCHANGED
        for each in self.each:
            each.deal(self.ranks.size)
        header = torch.zeros(self.ranks.size, 1 + 2 * len(self.each), dtype=torch.int64, device=CPU)
        header[:, 0] = max(each.change for each in self.each)
        for index, each in enumerate(self.each):
            header[:, 1 + 2 * index] = each.is_present
            header[:, 2 + 2 * index] = each.counts
        told = self._swap(header, [header.shape[1]] * self.ranks.size, [header.shape[1]] * self.ranks.size)
        told = told.view(self.ranks.size, -1)
        change = int(told[:, 0].max())
        if change != UNCHANGED:
            self._land(told)
        return change

    def _land(self, told: Tensor) -> None:
        """``told``: by rank, as in exchange()."""
        present = told[:, 1::2].amax(0).bool().tolist()
        counts = told[:, 2::2].tolist()
        words = [each.words_by_owner(self.ranks.size) for each in self.each]
        parts = [of_table[rank] for rank in range(self.ranks.size) for of_table in words]
        splits = [sum(of_table[rank].numel() for of_table in words) for rank in range(self.ranks.size)]
        sizes = [[n * (1 + each.table.width) for n, each in zip(row, self.each, strict=True)] for row in counts]
        received = self._swap(_joined(parts), splits, [sum(row) for row in sizes])
        everyones = _split(received, sizes)
        for index, each in enumerate(self.each):
            each.landed = None
            if present[index]:
                of_table = zip(everyones, counts, strict=True)
                sources = [_numbered(words[index], n[index], each.table.width) for words, n in of_table]
                each.land(sources, self.ranks.size)
            if self.shows_mean:
                each.show(self._of_all_ranks(index) if present[index] else None)
            each.note_seen()

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
            return
        updated = [
            (found.rows, _updated(each, found, groups[each.table.member.group], scale)) for each, found in landed
        ]
        if self.ranks.size > 1:
            for (each, _), parts in zip(landed, self._to_all(updated), strict=True):
                for rank, (rows, values) in enumerate(parts):
                    if rank != self.ranks.rank:
                        ops.put_rows_(each.table.param.detach(), rows, values)
        torch.autograd.graph.increment_version([each.table.param for each, _ in landed])

    # ---- messages

    def _to_all(self, own: Sequence[Numbered]) -> list[list[Numbered]]:
        """By table, every rank's rows. Collective."""
        size, rank = self.ranks.size, self.ranks.rank
        if size == 1:
            return [[numbered] for numbered in own]
        header = torch.tensor([[rows.numel() for rows, _ in own]] * size, dtype=torch.int64, device=CPU)
        counts = self._swap(header, [len(own)] * size, [len(own)] * size).view(size, -1).tolist()
        widths = [values.shape[1] for _, values in own]
        sizes = [[n * (1 + width) for n, width in zip(row, widths, strict=True)] for row in counts]
        words = _joined([each for rows, values in own for each in (rows.int(), values.reshape(-1).view(torch.int32))])
        sizes[rank] = [0] * len(own)
        splits = [0 if other == rank else words.numel() for other in range(size)]
        everyones = _split(self._swap(words.repeat(size - 1), splits, [sum(row) for row in sizes]), sizes)
        return [
            [
                own[index] if other == rank else _numbered(everyones[other][index], counts[other][index], widths[index])
                for other in range(size)
            ]
            for index in range(len(own))
        ]

    def _swap(self, sent: Tensor, splits: Sequence[int], received: Sequence[int]) -> Tensor:
        """``splits``: how many elements go to each rank; ``received``: how many come. Collective."""
        others = [n for rank, n in enumerate(splits) if rank != self.ranks.rank]
        self.traffic.messages += len(others)
        self.traffic.nbytes += sum(others) * sent.element_size()
        return self.ranks.all_to_all(sent.reshape(-1), splits, received)


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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _split(words: Tensor, sizes: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """By rank and table."""
    parts = iter(words.split([n for row in sizes for n in row]))
    return [[next(parts) for _ in row] for row in sizes]


def _numbered(words: Tensor, count: int, width: int) -> Numbered:
    return words[:count], words[count:].view(torch.float32).view(count, width)
