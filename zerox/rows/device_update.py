"""The update of the rows that have been reduced on an accelerator."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from zerox import ops
from zerox._C import RowRule
from zerox.memory.row_owners import CPU
from zerox.memory.row_table import by_dense_rule
from zerox.ops import SEGMENT_COLUMNS, Shard
from zerox.plan.form import BLOCK_NUMEL, num_blocks
from zerox.rows.device_table import ReducedRows, Table


def update_rows(table: Table, reduced: ReducedRows, rule: RowRule) -> None:
    """In place, where rows lie, if states are float32."""
    kept = table.kept
    if by_dense_rule(kept.states):
        update_together(table, reduced, rule)
        return
    rows, values = table.to_update(reduced)
    ops.update_rows_(
        rule.name,
        values,
        kept.master,
        reduced.values,
        kept.states,
        kept.step,
        rows,
        reduced.places,
        rule.options,
        rule.scale,
        rule.limit,
    )


def update_together(table: Table, reduced: ReducedRows, rule: RowRule) -> None:
    """By the kernels of dense parameters: rows are brought together, each as a parameter of its own, and put back.

    In 8 bits each begins with a block. Adam and Lion, which alone have states, count each update.
    """
    kept, (count, width) = table.kept, reduced.values.shape
    step = int(kept.step)
    kept.step.add_(1)
    if count == 0:
        return
    room = num_blocks(width) * BLOCK_NUMEL if kept.scales else width  # of a row

    def together(values: Tensor, rows: Tensor) -> Tensor:
        return pad(values[rows], (0, room - width)).reshape(-1)

    def put_back(values: Tensor, rows: Tensor, flat: Tensor) -> None:
        values.index_copy_(0, rows, flat.view(count, room)[:, :width])

    is_cut = math.isfinite(rule.limit)
    grads = (reduced.values * rule.scale).clamp(-rule.limit, rule.limit) if is_cut else reduced.values
    device = grads.device
    rows, param = table.to_update(reduced)
    values = together(param, rows)
    master = None if kept.master is None else together(kept.master, reduced.places)
    states = [together(state, reduced.places) for state in kept.states]
    scales = [each[reduced.places].reshape(-1) for each in kept.scales]
    segments = torch.zeros(count, SEGMENT_COLUMNS, dtype=torch.int64, device=device)
    segments[:, 0] = torch.arange(count, device=device) * room
    segments[:, 1] = segments[:, 0] + width
    segments[:, 3] = kept.number
    if not kept.scales:  # whose rounding hangs on no random bits
        segments[:, 4] = reduced.rows * width
    shard = Shard(
        values,
        master,
        pad(grads, (0, room - width)).reshape(-1),
        states,
        scales,
        segments,
        torch.ones(count, dtype=torch.uint8, device=device),
        torch.full((count,), step, dtype=torch.int64, device=device),
    )
    options = torch.tensor([rule.options], dtype=torch.float64, device=CPU).to(device, non_blocking=True)
    scale = torch.full((), 1.0 if is_cut else rule.scale, dtype=torch.float64, device=device)
    ops.update_(rule.name, [shard], options, scale)
    put_back(param, rows, values)
    if kept.master is not None and master is not None:
        put_back(kept.master, reduced.places, master)
    for before, after in zip(kept.states, states, strict=True):
        put_back(before, reduced.places, after)
    for before, after in zip(kept.scales, scales, strict=True):
        before.index_copy_(0, reduced.places, after.view(count, -1))
