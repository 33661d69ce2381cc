"""One table's gradient: why p.grad is none of its rows, and the mean that p.grad shows in stage 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox import _C as C
from zerox import _torch
from zerox.grads.grad_scale import Divisor, GradScale
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.memory.row_table import RowTable, by_dense_rule


def sparse_of(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A gradient that has these rows, in any order. torch 2.11 warns users unless it is told in both ways that nothing
    is to be checked."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)


class TableGrad:
    def __init__(self, table: RowTable, divisor: Divisor) -> None:
        self.table = table
        self.divisor = divisor

    def tensors(self) -> Iterator[Tensor]:
        grad = self.table.param.grad
        if grad is not None and grad.is_sparse:
            yield from (_torch.rows_of(grad), _torch.values_of(grad))

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
        if grad.dtype not in (torch.float32, param.dtype) or grad.shape != param.shape or grad.sparse_dim() != 1:
            return f"{self._known} has a gradient of {grad.dtype}, shape {tuple(grad.shape)}: rows of it are needed"
        bad = [number for number in _torch.rows_of(grad)[0].tolist() if not 0 <= number < param.shape[0]]
        if not bad:
            return ""
        return f"{self._known} has a gradient of rows that it does not have: it names row {bad[0]} of {param.shape[0]}"

    def rule(self, group: Mapping[str, Any], scale: GradScale) -> C.RowRule:
        """What step() does to it."""
        factor, limit = scale.values.get(self.divisor), scale.requested.limit
        table, rule = self.table, self.table.rule
        is_dense = by_dense_rule(stored.values for stored in table.state.values())
        options = rule.of_rows(group, int(table.step) + 1) if is_dense else group
        return C.RowRule(
            rule.name,
            list(map(float, rule.row(options))),
            scale=1.0 if factor is None else float(factor),
            limit=math.inf if limit is None else limit,
        )

    def show(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Makes p.grad the mean over all ranks: the union of their rows, rounded to its dtype."""
        param = self.table.param
        rows = torch.cat([rows for rows, _ in parts])
        values = torch.cat([values for _, values in parts])
        mean = sparse_of(rows, values, param.shape).coalesce()
        param.grad = mean.to(grad_dtype_of(param))

    @property
    def _known(self) -> str:
        return f"parameter {self.table.member.quoted}, in a param group with sparse=True,"
