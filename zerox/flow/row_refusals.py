"""What tables (param groups with sparse=True) do not go with, and what they share with parameters without a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zerox.flow.grads import Grads
from zerox.memory.bucket import Member
from zerox.memory.row_table import RowTable, check_group, check_tables, is_sparse
from zerox.options import InnerOptions, OptimizerOptions
from zerox.rules.adam import ADAM
from zerox.rules.of_groups import Rules

Groups = Sequence[Mapping[str, Any]]


def check_rows(
    options: OptimizerOptions, rules: Rules, grads: Grads, groups: Groups, members: Sequence[Member]
) -> None:
    """ValueError for tables that don't fit, or an option of the optimizer that they don't go with, with a way out."""
    for index, group in enumerate(groups):
        if is_sparse(group):
            for option, way_out in _without_rows(options, grads):
                raise ValueError(f"{option} does not go with sparse=True in param group {index}: {way_out}")
            if rules.of(group) is not ADAM:
                raise ValueError(
                    f"sparse=True in param group {index} does not go with the rule {rules.of(group).name!r}: rows have "
                    "Adam's only. Use FusedShardedAdam without a rule in this group"
                )
            check_group(group, f"param group {index}")
    check_tables(members, groups)


def _without_rows(options: OptimizerOptions, grads: Grads) -> Iterator[tuple[str, str]]:
    if isinstance(options, InnerOptions):
        yield "ShardedOptimizer", "use FusedShardedAdam, whose rule of rows is torch.optim.SparseAdam's"
    if options.stage == 3:
        yield "stage=3", "tables are whole on every rank. Use stage=2"
    if options.state_dtype is not torch.float32:
        yield f"state_dtype={options.state_dtype}", "moments of rows are float32. Leave it out"
    if options.reduce_dtype not in (None, torch.float32):
        yield f"reduce_dtype={options.reduce_dtype}", "rows travel in float32. Leave it out"
    if options.capturable:
        yield "capturable=True", "a CUDA graph does not know how many rows there are. Leave it at False"
    if grads.ranks.on_mesh:
        yield "a 2-D mesh", "rows travel over one axis. Pass a group, or one axis of it"
    if grads.teams.are_many:
        yield "a process_group of a param group", "no one has tried both yet. Use two optimizers"
    if grads.model.axes:
        yield "norm_group, or parameters that are DTensors,", "no one has tried both yet. Use two optimizers"


def refuse_tables(tables: Sequence[RowTable], call: str) -> None:
    """NotImplementedError where a call knows other parameters only."""
    if tables:
        raise NotImplementedError(
            f"zerox: param groups with sparse=True, as that of {tables[0].member.quoted}, do not go with {call} yet"
        )


def zero_grads(members: Iterable[Member], set_to_none: bool) -> None:
    """As torch's zero_grad(), of parameters that are in no bucket."""
    for param in (member.param for member in members):
        if param.grad is not None:
            if set_to_none:
                param.grad = None
            else:
                param.grad.detach_().zero_()
