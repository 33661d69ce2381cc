"""What tables (param groups with sparse=True) must be, and what they share with parameters without a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerox.memory.bucket import Member
from zerox.memory.row_table import check_group, check_tables, is_sparse
from zerox.rules.adam import ADAM
from zerox.rules.of_groups import Rules

Groups = Sequence[Mapping[str, Any]]


def check_rows(rules: Rules, groups: Groups, members: Sequence[Member]) -> None:
    """ValueError for tables that don't fit, and for what groups may not have beside them.

    zerox/plan/combinations.py refuses pairs of options.
    """
    for index, group in enumerate(groups):
        if is_sparse(group):
            if rules.of(group) is not ADAM:
                raise ValueError(
                    f"sparse=True in param group {index} does not go with the rule {rules.of(group).name!r}: rows have "
                    "Adam's only. Use FusedShardedAdam without a rule in this group"
                )
            check_group(group, f"param group {index}")
    check_tables(members, groups)


def zero_grads(members: Iterable[Member], set_to_none: bool) -> None:
    """As torch's zero_grad(), of parameters that are in no bucket."""
    for param in (member.param for member in members):
        if param.grad is not None:
            if set_to_none:
                param.grad = None
            else:
                param.grad.detach_().zero_()
