"""What tables (param groups with sparse=True) must be, and what they share with parameters without a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerox.grads.grads import Grads
from zerox.memory.bucket import Member
from zerox.memory.row_table import check_group, check_ranks, check_tables, is_sparse

Groups = Sequence[Mapping[str, Any]]


def check_rows(groups: Groups, members: Sequence[Member], grads: Grads, shards_tables: bool) -> None:
    """ValueError for tables that don't fit, and for what groups may not have beside them. ``shards_tables``: in stage
    3, of several ranks.

    zerox/plan/combinations.py refuses pairs of options.
    """
    subgroups = grads.subgroups
    for index, group in enumerate(groups):
        where = f"param group {index}"
        check_group(group, where)
        if is_sparse(group):
            check_ranks(
                where, subgroups.of_group[index] is not subgroups.all, bool(subgroups.ranks.on_mesh), shards_tables
            )
    check_tables((member.name, member.param, groups[member.group]) for member in members)


def zero_grads(members: Iterable[Member], set_to_none: bool) -> None:
    """As torch's zero_grad(), of parameters that are in no bucket."""
    for param in (member.param for member in members):
        if param.grad is not None:
            if set_to_none:
                param.grad = None
            else:
                param.grad.detach_().zero_()
