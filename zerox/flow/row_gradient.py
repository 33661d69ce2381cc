"""One table's gradient: this rank's rows in p.grad, and the mean of the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerox import ops
from zerox.flow.grad_scale import Divisor
from zerox.memory.row_owners import BLOCK_ROWS, CPU
from zerox.memory.row_table import RowTable

# What happened to p.grad since ranks last exchanged it; the larger number wins.
UNCHANGED, ADDED, REPLACED = range(3)


class Landed(NamedTuple):
    """The mean of the rows that this rank owns and that some rank touched, with the places of their state."""

    rows: Tensor
    places: Tensor
    values: Tensor


class TableGrad:
    """``seen``: p.grad as it was exchanged, and its version; None: it was not, or is not that gradient any more.

    ``local``: this rank's rows, each once. ``counts``: how many of them each owner gets.
    """

    def __init__(self, table: RowTable, divisor: Divisor) -> None:
        self.table = table
        self.divisor = divisor
        self.seen: tuple[Tensor | None, int] | None = None
        self.local: tuple[Tensor, Tensor] | None = None
        self.dealt: Tensor | None = None
        self.counts = torch.zeros(1, dtype=torch.int64, device=CPU)
        self.landed: Landed | None = None

    def tensors(self) -> Iterator[Tensor]:
        grad = self.table.param.grad
        if grad is not None and grad.is_sparse:
            yield from (grad._indices(), grad._values())
        yield from self.landed or ()

    def forget(self) -> None:
        self.seen = self.local = self.dealt = self.landed = None

    @property
    def is_present(self) -> bool:
        return self.table.param.grad is not None

    @property
    def change(self) -> int:
        if self.seen is None or self.seen[0] is not self.table.param.grad:
            return REPLACED
        return UNCHANGED if self.seen[1] == _version(self.seen[0]) else ADDED

    def note_seen(self) -> None:
        grad = self.table.param.grad
        self.seen = (grad, _version(grad))
        self.local = self.dealt = None

    def sum_up(self, anew: bool = False) -> str:
        """Adds up rows of the same number, unless that holds already. Why it can't; empty if it can."""
        grad, table = self.table.param.grad, self.table
        self.local = None
        if grad is None or (self.change == UNCHANGED and not anew):
            return ""
        if grad.layout is not torch.sparse_coo:
            return (
                f"{self._known} has a dense gradient: it is used outside the modules with sparse=True (tied weights), "
                "or its module was made without. Take it out of the sparse group"
            )
        if grad.dtype is not torch.float32 or grad.shape != table.param.shape or grad.sparse_dim() != 1:
            return f"{self._known} has a gradient of {grad.dtype}, shape {tuple(grad.shape)}: rows of it are needed"
        rows, values = grad.detach()._indices()[0].contiguous(), grad.detach()._values().contiguous()
        try:
            order = None if grad.is_coalesced() else rows.sort()[1]  # of equal rows: in which torch's coalesce() adds
            self.local = ops.sum_rows([rows], [values], table.param.shape[0], table.width, order)
        except ValueError as error:
            return f"{self._known} has a gradient of rows that it does not have: {error}"
        return ""

    def deal(self, num_owners: int) -> None:
        """By owner, what sum_up() has found."""
        if self.change == UNCHANGED:
            return  # counts are those of the last time
        if self.local is None:
            self.local = self._nothing()
        if num_owners == 1:
            self.counts = torch.tensor([self.local[0].numel()], device=CPU)
        else:
            self.dealt, self.counts = ops.deal_rows(*self.local, self.table.owners.of_block, BLOCK_ROWS, num_owners)

    def words_by_owner(self, num_owners: int) -> list[Tensor]:
        """int32 words: of each owner the numbers of its rows, then their values."""
        if self.local is None:  # another rank's gradient has changed
            self.sum_up(anew=True)
        rows, values = self.local = self.local or self._nothing()
        if num_owners == 1:
            return [torch.cat([rows.int(), values.reshape(-1).view(torch.int32)])]
        if self.dealt is None:
            self.dealt, _ = ops.deal_rows(rows, values, self.table.owners.of_block, BLOCK_ROWS, num_owners)
        return list(self.dealt.split([count * (1 + self.table.width) for count in self.counts.tolist()]))

    def land(self, sources: Sequence[tuple[Tensor, Tensor]], num_ranks: int) -> None:
        """``sources``: what each rank sent, which is added in this order."""
        numbers, values = zip(*sources, strict=True)
        rows, sums = ops.sum_rows(list(numbers), list(values), *self.table.param.shape)
        divisor = num_ranks if self.divisor is None else self.divisor
        self.landed = Landed(rows, self.table.owners.places_of(rows), sums if divisor == 1 else sums.div_(divisor))

    def show(self, parts: Sequence[tuple[Tensor, Tensor]] | None) -> None:
        """Makes p.grad the mean over all ranks: the union of their rows."""
        param = self.table.param
        if parts is None:
            return
        rows = torch.cat([rows.long() for rows, _ in parts])
        values = torch.cat([values for _, values in parts])
        param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape).coalesce()

    def multiply(self, factor: Tensor) -> None:
        """Of what landed, and of p.grad, which shows it."""
        assert self.landed is not None
        self.landed.values.mul_(float(factor))
        if self.table.param.grad is not None:
            self.table.param.grad.mul_(float(factor))
            self.note_seen()

    @property
    def _known(self) -> str:
        return f"parameter {self.table.member.quoted}, in a param group with sparse=True,"

    def _nothing(self) -> tuple[Tensor, Tensor]:
        empty = torch.empty(0, dtype=torch.int64, device=CPU)
        return empty, torch.empty(0, self.table.width, dtype=torch.float32, device=CPU)


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
