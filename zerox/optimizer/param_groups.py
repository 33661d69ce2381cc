"""The part of an optimizer that is about its param groups: those that are added, and what users make of the list.

Note [Param groups are the user's]
torch trains what ``param_groups`` has when step() runs. So users append to a group's ``params``, put other groups into
the list, or another list in its place, as Lightning's BaseFinetuning does when it resumes. Ranks have to make buckets
together. So the groups are looked at at a sync point, by the identity of their parameters. If one rank finds others
than it knew, all compare what they have: they go on only if all have the same. Parameters that are new are taken in
as add_param_group() takes them; those that are in another group have its options from now on. What can't be taken in
raises on all ranks, each time until the groups are as they were: a parameter that is gone, which lies in a bucket with
others, and one whose new group has another rule, divisor or process group, or is a table's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerox._C import SyncPoint
from zerox.calls.phases import Visit
from zerox.memory.bucket import Member, members_of
from zerox.memory.row_table import is_sparse
from zerox.optimizer.adoption import Adoption
from zerox.optimizer.core import Core, Face
from zerox.optimizer.groups import NAMES, Groups
from zerox.options import check_params
from zerox.ranks.subgroups import OF_GROUP, Subgroup
from zerox.rules.rule import Rule

SAME = "change param_groups alike on all ranks"


@dataclass(frozen=True)
class Regrouped:
    """Param groups as they are now, which are not those that were known: ``members``, all of them. ``refusal``: why
    they can't be taken in; else empty."""

    members: tuple[Member, ...] = ()
    refusal: str = ""


class ParamGroups:
    """Those of an optimizer that is built, for all ranks. Phases: "groups"."""

    def __init__(self, core: Core, adoption: Adoption) -> None:
        self.core = core
        self.groups = core.groups
        self.adoption = adoption
        core.phases.before_sync("groups", self._before_sync)
        core.phases.adopting("groups", self._adopt)

    def add(self, param_group: dict[str, Any]) -> None:
        """Collective. A group that is refused is not added."""
        core, groups = self.core, self.groups.param_groups
        core.sync(SyncPoint.ADD_PARAM_GROUP)  # what is on its way was launched with the buckets there are
        count, own = len(groups), core.calls.own
        try:
            with core.ranks.refusals_told():
                self.groups.add(param_group)
                known = core.members
                own.note(groups[count:], [m.param for m in known])
                members = [m for m in members_of(groups, own.params) if m.group == count]
                check_params([m.name for m in known + members], [m.param for m in known + members])
            core.grads.subgroups.take(groups[count:])
            self.adoption.adopt(members)
        except Exception:
            del groups[count:]
            own.keep(groups)
            core.grads.subgroups.forget_after(count)
            raise
        self.groups.note_seen()

    # ---- inside

    def _before_sync(self, visit: Visit) -> None:
        if self.groups.are_as_seen:
            return
        visit.regrouped = self._find_regrouped()
        visit.has_news = True
        visit.refusal = visit.refusal or visit.regrouped.refusal

    def _adopt(self, visit: Visit) -> None:
        self._take(visit.regrouped)

    def _find_regrouped(self) -> Regrouped:
        """What users have made of the groups since ranks knew them. On this rank alone."""
        groups = self.groups.param_groups
        for index, group in enumerate(groups):
            if not isinstance(group, dict) or "params" not in group:
                return Regrouped(refusal=f"param group {index} must be a dict with 'params', got {group!r:.60}")
            params = group["params"]
            group["params"] = [params] if isinstance(params, Tensor) else list(params)
            if strange := [each for each in group["params"] if not isinstance(each, Tensor)]:
                return Regrouped(refusal=f"param group {index} has {strange[0]!r:.60} among its params, no tensor")
        known = {id(member.param): member for member in self.core.members}
        self.core.calls.own.note(groups, [m.param for m in known.values()])
        self.core.calls.own.keep(groups)
        members = tuple(_name_members(groups, known, self.core.calls.own.params))
        return Regrouped(members, next(self._refusals(members, known), ""))

    def _refusals(self, members: Sequence[Member], known: Mapping[int, Member]) -> Iterator[str]:
        now, groups = {id(member.param): member for member in members}, self.groups.param_groups
        if sum(len(group["params"]) for group in groups) > len(members) + len(self.core.calls.own.of(groups)):
            yield "param_groups have a parameter twice: take it out of one of the groups"
        trained = [
            (bucket.members, bucket.rule, self.core.calls.scale.divisors[i])
            for i, bucket in enumerate(self.core.buckets)
        ]
        of_tables = self.core.calls.row_grads.each
        tables = [([each.table.member], each.table.rule, each.divisor) for each in of_tables]
        for index, (of_one, rule, divisor) in enumerate([*trained, *tables]):
            for member in of_one:
                new = now.get(id(member.param))
                if new is None:
                    yield (
                        f"parameter {member.quoted} was taken out of param_groups, and lies in a bucket with others: "
                        "put it back, and freeze it (p.requires_grad_(False)) if it is not to be trained, or build "
                        "another optimizer without it"
                    )
                elif why := self._misfit(member, new, rule, divisor, is_table=index >= len(trained)):
                    yield f"parameter {member.quoted} was moved to param group {new.group}, number {new.number}: {why}"
        for index, group in enumerate(groups):
            of_group = {id(self._subgroup_of(known[id(p)])): known[id(p)] for p in group["params"] if id(p) in known}
            if len(of_group) > 1:
                one, other, *_ = of_group.values()
                yield (
                    f"param group {index} has parameters {one.quoted} and {other.quoted}, which groups with another "
                    "process_group had: build another optimizer"
                )

    def _misfit(self, then: Member, now: Member, rule: Rule, divisor: float | None, is_table: bool) -> str:
        group, another = self.groups.param_groups[now.group], "build another optimizer"
        if self.core.rules.of(group) is not rule:
            now_of = self.core.rules.of(group).name
            return f"its state is of the rule {rule.name!r}, and the group's is {now_of!r}; {another}"
        if self.core.options.divisor_of(group) != divisor:
            return f"its gradient is divided by another gradient_divisor; {another}"
        if is_sparse(group) is not is_table:
            return f"only one of its groups has sparse=True; {another}"
        known = "it is a table, of sparse=True" if is_table else "a zerox.Sparsity knows it"
        if (is_table or self.core.sparsity is not None) and (now.number, now.group) != (then.number, then.group):
            return f"{known}, and stays where it was, {then.number} in group {then.group}; append what is new behind it"
        return ""

    def _subgroup_of(self, member: Member) -> Subgroup:
        return self.core.grads.subgroups.of_group[member.group]

    def _take(self, now: Regrouped | None) -> None:
        """What any rank has found in its groups. Collective: ValueError on all ranks if they don't have the same."""
        members = (now or Regrouped(tuple(members_of(self.groups.param_groups, self.core.calls.own.params)))).members
        known = {id(member.param): member for member in self.core.members}
        self.core.ranks.check_same(list(self._lines(members, known)), way_out=SAME)
        self.core.calls.own.agree(self.core.ranks, known.values())
        if now is None:
            return
        added = [member for member in members if id(member.param) not in known]
        with self.core.ranks.refusals_told():
            for index, group in enumerate(self.groups.param_groups):
                self.groups.complete(group, index)
                for option, value in self.core.rules.defaults_of(group, self.groups.optimizer.defaults).items():
                    group.setdefault(option, value)
                self.groups.check(group)
            check_params([m.name for m in members], [m.param for m in members])
        of_known = {index: self._subgroup_of(m) for m in known.values() for index in _groups_of(m, members)}
        asked = [group.get(OF_GROUP) for group in self.groups.param_groups]
        try:
            self._take_subgroups(of_known)
            self._move({id(member.param): member for member in members})
            for index in dict.fromkeys(member.group for member in added):
                self.adoption.adopt([member for member in added if member.group == index])
        except Exception:
            for group, own in zip(self.groups.param_groups, asked, strict=True):
                group.update({OF_GROUP: own} if own is not None else {})
            raise
        self.groups.note_seen()

    def _lines(self, members: Sequence[Member], known: Mapping[int, Member]) -> Iterator[str]:
        """What ranks compare. Parameters of a smaller subgroup may have other names than those of the next one."""
        subgroups, groups = self.core.grads.subgroups, self.groups.param_groups
        for index, group in enumerate(groups):
            shared = len(group["params"]) - len(self.core.calls.own.of([group]))
            yield f"{shared} parameters in param group {index}"
        for member in members:
            then = known.get(id(member.param))
            is_expert = subgroups.are_many or OF_GROUP in groups[member.group]
            name = "" if is_expert else f" {(then or member).name!r}"
            yield f"{f'parameter {then.number}' if then else 'a new parameter'}{name} in param group {member.group}"

    def _take_subgroups(self, known: Mapping[int, Subgroup]) -> None:
        """``known``: of groups that have a parameter which had one. Collective: the others are asked."""
        subgroups, before = self.core.grads.subgroups, self.core.grads.subgroups.of_group
        subgroups.of_group = []
        try:
            for index, group in enumerate(self.groups.param_groups):
                if index in known:
                    subgroups.of_group.append(known[index])
                else:
                    subgroups.take([group])
        except Exception:
            subgroups.of_group = before
            raise

    def _move(self, now: Mapping[int, Member]) -> None:
        """Parameters that were known are where the groups have them. On this rank alone."""
        for index, bucket in enumerate(self.core.buckets):
            moved = [now[id(member.param)] for member in bucket.members]
            if moved != bucket.members:
                bucket.place(moved)
                self.core.grads.refresh_segments(index)
        for each in self.core.calls.row_grads.each:
            each.table.member = now[id(each.table.param)]
        self.groups.frozen = [now[id(member.param)] for member in self.groups.frozen if id(member.param) in now]
        self.core.calls.scale.of_groups = self.groups.divisors()
        self.core.update.regroup(self.groups.param_groups)


def not_taken_in(core: Core) -> list[Member]:
    """Parameters that users put into the groups since ranks synchronized: their gradients are the user's until then."""
    if core.groups.are_as_seen:
        return []
    known = {id(member.param) for member in core.members} | core.calls.own.params.keys()
    given = [group["params"] for group in core.groups.param_groups if isinstance(group, dict) and "params" in group]
    params = [param for each in given for param in ([each] if isinstance(each, Tensor) else each)]
    return [Member("", p, 0, -1) for p in params if isinstance(p, Tensor) and id(p) not in known]


def _name_members(
    groups: Sequence[dict[str, Any]], known: Mapping[int, Member], apart: Collection[int]
) -> Iterator[Member]:
    """Where names no longer stand beside their parameters, those that were known have the names that they had."""
    position = 0
    for group in groups:
        if NAMES in group and len(group[NAMES]) != len(group["params"]):
            places = enumerate(group["params"], position)
            group[NAMES] = [known[id(p)].name if id(p) in known else f"param {place}" for place, p in places]
        position += len(group["params"])
    return members_of(groups, apart)


def _groups_of(member: Member, members: Sequence[Member]) -> list[int]:
    return [each.group for each in members if each.param is member.param]


class ParamGroupsFace(Face):
    _groups: Groups | ParamGroups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch. Collective once the optimizer is built. A group that is refused is not added."""
        self._groups.add(param_group)
