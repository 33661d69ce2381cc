"""One table's gradient: this rank's rows in p.grad, and the mean of the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox import _C as C
from zerox.flow.grad_scale import Divisor, GradScale
from zerox.memory.row_owners import CPU
from zerox.memory.row_table import RowTable

# What happened to p.grad since ranks last exchanged it; the larger number wins.
UNCHANGED, ADDED, REPLACED = range(3)


class TableGrad:
    """``seen``: p.grad as it was exchanged, and its version; None: it was not, or is not that gradient any more.

    ``landed``: the mean of the rows that this rank owns and that some rank touched; None if no rank has a gradient.
    """

    def __init__(self, table: RowTable, divisor: Divisor) -> None:
        self.table = table
        self.divisor = divisor
        self.seen: tuple[Tensor | None, int] | None = None
        self.landed: C.LandedRows | None = None
        self.nothing = C.LocalRows(
            torch.empty(0, dtype=torch.int64, device=CPU), torch.empty(0, table.width, device=CPU), True
        )

    def tensors(self) -> Iterator[Tensor]:
        grad = self.table.param.grad
        if grad is not None and grad.is_sparse:
            yield from (grad._indices(), grad._values())
        if self.landed is not None:
            yield from (self.landed.rows, self.landed.places, self.landed.values)

    def forget(self) -> None:
        self.seen = self.landed = None

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

    def refusal(self) -> str:
        """Why p.grad can't be exchanged; empty if it can."""
        grad, param = self.table.param.grad, self.table.param
        if grad is None:
            return ""
        if grad.layout is not torch.sparse_coo:
            return (
                f"{self._known} has a dense gradient: it is used outside the modules with sparse=True (tied weights), "
                "or its module was made without. Take it out of the sparse group"
            )
        if grad.dtype is not torch.float32 or grad.shape != param.shape or grad.sparse_dim() != 1:
            return f"{self._known} has a gradient of {grad.dtype}, shape {tuple(grad.shape)}: rows of it are needed"
        return ""

    def refusal_of_numbers(self) -> str:
        """The same for the rows that it names, once it is known that those of some table are wrong."""
        grad, num_rows = self.table.param.grad, self.table.param.shape[0]
        bad = [] if grad is None else [n for n in grad._indices()[0].tolist() if not 0 <= n < num_rows]
        if not bad:
            return ""
        return f"{self._known} has a gradient of rows that it does not have: it names row {bad[0]} of {num_rows}"

    def local(self) -> C.LocalRows:
        """This rank's rows. Only if nothing is refused."""
        grad = self.table.param.grad
        if grad is None:
            return self.nothing
        return C.LocalRows(grad._indices()[0].contiguous(), grad._values().detach().contiguous(), grad.is_coalesced())

    def step(self, group: Mapping[str, Any], scale: GradScale) -> tuple[C.LandedRows, C.RowStep]:
        """Begins one, of what has landed."""
        assert self.landed is not None
        self.table.step += 1
        factor, landed = scale.values.get(self.divisor), self.landed
        by = 1.0 if factor is None else float(factor)
        if (limit := scale.requested.limit) is not None:
            landed, by = C.LandedRows(landed.rows, landed.places, (landed.values * by).clamp_(-limit, limit)), 1.0
        beta1, beta2 = group["betas"]
        return landed, C.RowStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            step=int(self.table.step),
            maximize=bool(group.get("maximize", False)),
            scale=by,
        )

    def show(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Makes p.grad the mean over all ranks: the union of their rows."""
        param = self.table.param
        rows = torch.cat([rows for rows, _ in parts])
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


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
