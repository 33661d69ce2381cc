"""One table on an accelerator: its gradient as rows, on this rank and over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerox import _torch
from zerox._C import RowChange
from zerox.plan.plan import BLOCK_ROWS
from zerox.rows.row_gradient import sparse_of


class Rows(NamedTuple):
    """Some of one table: int64 ``[n]``, and ``[n, D]`` of float32 or, for updated rows, of the table's dtype."""

    rows: Tensor
    values: Tensor


class ReducedRows(NamedTuple):
    """The mean of the rows of one table that this rank owns and that some rank touched, in ascending order."""

    rows: Tensor  # int64 [n]
    places: Tensor  # int64 [n]
    values: Tensor  # float32 [n, D]


class KeptRows(NamedTuple):
    """What this rank keeps of the rows that it owns, by place, ``[own rows, D]``; ``number``: the parameter's. ``own``:
    their values, if the table is sharded (ZeRO stage 3)."""

    number: int
    states: Sequence[Tensor]
    scales: Sequence[Tensor]  # of 8-bit states, [own rows, ceil(D / 256)] each
    master: Tensor | None
    step: Tensor
    own: Tensor | None


@dataclass
class Table:
    """``owners`` and ``places``: int64, of each block of rows. ``divisor``: float32 on the device, since torch divides
    by a tensor there, and multiplies by the reciprocal of a number. ``seen``: the gradient that ranks exchanged last,
    with its version. ``parts``: of this rank's gradient, what each owner gets."""

    param: Tensor
    kept: KeptRows
    owners: Tensor
    places: Tensor
    owned: list[int]  # how many rows each rank owns
    divisor: Tensor | None
    seen: tuple[Tensor | None, int] | None = None
    parts: Sequence[Rows] = ()
    most: Sequence[int] = ()  # rows that may have been reduced at each owner
    reduced: ReducedRows | None = None

    @property
    def num_rows(self) -> int:
        return int(self.param.shape[0])

    @property
    def width(self) -> int:
        return int(self.param.shape[1])

    def change(self) -> RowChange:
        grad = self.param.grad
        if self.seen is None or self.seen[0] is not grad:
            return RowChange.REPLACED
        return RowChange.UNCHANGED if self.seen[1] == _version_of(grad) else RowChange.ADDED

    def note_seen(self) -> None:
        self.seen = (self.param.grad, _version_of(self.param.grad))

    def gradient(self) -> Rows | None:
        """This rank's, each row once and in ascending order, added up as torch.optim.SparseAdam does; None if it is no
        rows."""
        grad = self.param.grad
        if grad is None:
            return self.none()
        fits = grad.layout is torch.sparse_coo and grad.dtype in (torch.float32, self.param.dtype)
        if not fits or grad.shape != self.param.shape or grad.sparse_dim() != 1:
            return None
        total = grad.detach()
        if total.is_coalesced():  # the flag may be wrong
            total = sparse_of(_torch.rows_of(total)[0], _torch.values_of(total), total.shape)
        total = total.float().coalesce()
        return Rows(_torch.rows_of(total)[0], _torch.values_of(total))

    def none(self) -> Rows:
        device = self.param.device
        values = torch.empty(0, self.width, dtype=torch.float32, device=device)
        return Rows(torch.empty(0, dtype=torch.int64, device=device), values)

    def to_update(self, reduced: ReducedRows) -> Rows:
        """What is updated: values of which, in place, and where the rows that have been reduced are among them."""
        own = self.kept.own
        return Rows(reduced.rows, self.param.detach()) if own is None else Rows(reduced.places, own)

    def owners_of(self, rows: Tensor) -> Tensor:
        return self.owners[(rows // BLOCK_ROWS).clamp_(0, self.owners.numel() - 1)]

    def reduce(self, parts: Sequence[Rows]) -> None:
        """``parts``: what each rank sent, each row once."""
        rows, values = parts[0] if len(parts) == 1 else in_their_order(parts)
        if self.divisor is not None:
            values = values / self.divisor
        places = rows if len(parts) == 1 else self.places[rows // BLOCK_ROWS] + rows % BLOCK_ROWS
        self.reduced = ReducedRows(rows, places, values)

    def write(self, rows: Tensor, values: Tensor) -> None:
        self.param.detach().index_copy_(0, rows, values)


def in_their_order(parts: Sequence[Rows]) -> Rows:
    """Adds up equal rows of several ranks in the order of ranks."""
    rows, order = torch.sort(torch.cat([each.rows for each in parts]), stable=True)
    rows, counts = torch.unique_consecutive(rows, return_counts=True)  # waits for the device
    values = torch.cat([each.values for each in parts])[order]
    return Rows(rows, torch.segment_reduce(values, "sum", lengths=counts, axis=0, unsafe=True, initial=0))


def _version_of(grad: Tensor | None) -> int:
    return 0 if grad is None else _torch.version_of(grad)
