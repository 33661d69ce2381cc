"""Which of an optimizer's new parameters share a bucket, and which ranks share the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerox.memory.bucket import Member
from zerox.options import OptimizerOptions, Planned
from zerox.plan.buckets import BucketPlan
from zerox.ranks.model_axes import ModelAxes
from zerox.ranks.subgroups import Subgroup, Subgroups
from zerox.rules.of_groups import Rules


def plan_trained(
    options: OptimizerOptions,
    rules: Rules,
    subgroups: Subgroups,
    model: ModelAxes,
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
) -> list[tuple[BucketPlan, Subgroup]]:
    """In reverse order of registration, as far as parameters of different buckets have one."""

    def planned(member: Member) -> Planned:
        group = groups[member.group]
        over = model.replicated_over(member.param)
        return member.name, member.local, rules.of(group).name, options.divisor_of(group), over

    found = []
    for subgroup, places in _by_subgroup(subgroups, members):
        for plan in options.plan([planned(members[i]) for i in places], subgroups.ranks.backend, subgroup.ranks.size):
            found.append((replace(plan, params=tuple(places[i] for i in plan.params)), subgroup))
    return sorted(found, key=lambda each: -max(each[0].params))


def _by_subgroup(subgroups: Subgroups, members: Sequence[Member]) -> Iterator[tuple[Subgroup, list[int]]]:
    for subgroup in (subgroups.all, *subgroups.made.values()):
        if places := [i for i, member in enumerate(members) if subgroups.of_group[member.group] is subgroup]:
            yield subgroup, places
