"""Which of an optimizer's new parameters share a bucket, and which ranks share the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerox.memory.bucket import Member
from zerox.options import OptimizerOptions, Planned
from zerox.plan.buckets import BucketPlan
from zerox.ranks.model_axes import ModelAxes
from zerox.ranks.teams import Team, Teams
from zerox.rules.of_groups import Rules


def plan_trained(
    options: OptimizerOptions,
    rules: Rules,
    teams: Teams,
    model: ModelAxes,
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
) -> list[tuple[BucketPlan, Team]]:
    """In reverse order of registration, as far as parameters of different buckets have one."""

    def planned(member: Member) -> Planned:
        group = groups[member.group]
        over = model.replicated_over(member.param)
        return member.name, member.local, rules.of(group).name, options.divisor_of(group), over

    found = []
    for team, places in _by_team(teams, members):
        for plan in options.plan([planned(members[i]) for i in places], teams.ranks.backend, team.ranks.size):
            found.append((replace(plan, params=tuple(places[i] for i in plan.params)), team))
    return sorted(found, key=lambda each: -max(each[0].params))


def _by_team(teams: Teams, members: Sequence[Member]) -> Iterator[tuple[Team, list[int]]]:
    for team in (teams.all, *teams.made.values()):
        if places := [i for i, member in enumerate(members) if teams.of_group[member.group] is team]:
            yield team, places
