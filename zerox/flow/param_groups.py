"""The part of an optimizer that is about its param groups: those that are added, and what users make of the list.

Note [Param groups are the user's]
torch trains what ``param_groups`` has when step() runs. So users append to a group's ``params``, put other groups into
the list, or another list in its place, as Lightning's BaseFinetuning does when it resumes. Ranks have to make buckets
together. So the groups are looked at where ranks meet, by the identity of their parameters. If one rank finds others
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

from zerox import _C as C
from zerox._C import Meeting, Outcome
from zerox.flow.grad_calls import GradCalls
from zerox.flow.grads import Grads
from zerox.flow.inside import Inside
from zerox.flow.terms import check_pairs, words_of_calls
from zerox.flow.update import Update
from zerox.memory.bucket import Bucket, Member, members_of
from zerox.memory.row_table import is_sparse
from zerox.memory.shared import Shared
from zerox.memory.torch_optimizer import TorchOptimizer
from zerox.options import OptimizerOptions, check_params
from zerox.ranks.group import Ranks
from zerox.ranks.teams import OF_GROUP, Team, own_group
from zerox.ranks.wrapped import bare_names
from zerox.rules.of_groups import Rules
from zerox.rules.rule import Rule

NAMES = "param_names"  # of a group, where parameters were given with names
SAME = "change param_groups alike on all ranks"


@dataclass(frozen=True)
class Regrouped:
    """Param groups as they are now, which are not those that were known: ``members``, all of them. ``refusal``: why
    they can't be taken in; else empty."""

    members: tuple[Member, ...] = ()
    refusal: str = ""


class ParamGroups(TorchOptimizer):
    _rules: Rules
    _options: OptimizerOptions
    _buckets: list[Bucket]
    _ranks: Ranks | None
    _grads: Grads
    _calls: GradCalls
    _update: Update
    _frozen = Shared[list[Member]]([])  # parameters that have no bucket
    _seen_groups = Shared[list[list[Tensor]]]([])  # each one's parameters, as ranks know them

    @property
    def inside(self) -> Inside:
        raise NotImplementedError

    def _settle(self, meeting: Meeting, arguments: Sequence[float] = (), refusal: str = "") -> Outcome:
        raise NotImplementedError

    def _adopt(self, members: Sequence[Member]) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch. Collective once the optimizer is built. A group that is refused is not added."""
        if self._ranks is None:
            self._add_group(param_group)
            return
        self._settle(Meeting.ADD_PARAM_GROUP)  # what is on its way was launched with the buckets there are
        count, own = len(self.param_groups), self._calls.own
        try:
            with self._ranks.refusals_told():
                self._add_group(param_group)
                known = self.inside.members
                own.note(self.param_groups[count:], [m.param for m in known])
                members = [m for m in members_of(self.param_groups, own.params) if m.group == count]
                check_params([m.name for m in known + members], [m.param for m in known + members])
            self._grads.teams.take(self.param_groups[count:])
            self._adopt(members)
        except Exception:
            del self.param_groups[count:]
            own.keep(self.param_groups)
            self._grads.teams.forget_after(count)
            raise
        self._note_groups()

    # ---- inside

    def _check_pairs(self, added: Sequence[Member], overlaps: bool, joins: bool = False) -> None:
        """On this rank alone."""
        known = [m for bucket in self._buckets for m in bucket.members], [*added, *self._frozen]
        calls = words_of_calls(overlaps, joins, masks=joins and self.inside.sparsity is not None)
        check_pairs(self._options, self._grads.teams, self.param_groups, known, calls)
        self._calls.own.check(self.param_groups, self._rules, self._options, bool(self._grads.model.axes))

    def _add_group(self, param_group: Any) -> None:
        """On this rank alone."""
        if isinstance(param_group, dict):  # anything else torch refuses
            param_group = own_group(param_group)
            self._complete(param_group, len(self.param_groups))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if NAMES in group:
            group[NAMES] = bare_names(group[NAMES], group["params"])
        self._check_group(group)

    def _complete(self, group: dict[str, Any], index: int) -> None:
        self._options.check_pairs(group)
        self._rules.complete(group, f"param group {index}", self.defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Once torch's defaults are in it."""
        self._rules.cleared(group)
        self._rules.of(group).check(group)
        self._options.check_group(group, self._rules.of(group).defaults)

    def _divisor_of(self, group: Mapping[str, Any]) -> float | None:
        return self._options.divisor_of(group)

    def _note_groups(self) -> None:
        self._seen_groups = [list(group["params"]) for group in self.param_groups]

    @property
    def _are_as_seen(self) -> bool:
        groups, seen = self.param_groups, self._seen_groups
        return len(groups) == len(seen) and all(map(_has_same, groups, seen))

    def _not_taken_in(self) -> list[Member]:
        """Parameters that users put into the groups since ranks met: their gradients are the user's until then."""
        if self._are_as_seen:
            return []
        known = {id(member.param) for member in self.inside.members} | self._calls.own.params.keys()
        given = [group["params"] for group in self.param_groups if isinstance(group, dict) and "params" in group]
        params = [param for each in given for param in ([each] if isinstance(each, Tensor) else each)]
        return [Member("", p, 0, -1) for p in params if isinstance(p, Tensor) and id(p) not in known]

    def _regrouped(self) -> Regrouped | None:
        """What users have made of the groups since ranks knew them; None if nothing. On this rank alone."""
        if self._are_as_seen:
            return None
        groups = self.param_groups
        for index, group in enumerate(groups):
            if not isinstance(group, dict) or "params" not in group:
                return Regrouped(refusal=f"param group {index} must be a dict with 'params', got {group!r:.60}")
            params = group["params"]
            group["params"] = [params] if isinstance(params, Tensor) else list(params)
            if strange := [each for each in group["params"] if not isinstance(each, Tensor)]:
                return Regrouped(refusal=f"param group {index} has {strange[0]!r:.60} among its params, no tensor")
        known = {id(member.param): member for member in self.inside.members}
        self._calls.own.note(groups, [m.param for m in known.values()])
        self._calls.own.keep(groups)
        members = tuple(_named(groups, known, self._calls.own.params))
        return Regrouped(members, next(self._refusals(members, known), ""))

    def _refusals(self, members: Sequence[Member], known: Mapping[int, Member]) -> Iterator[str]:
        now, groups = {id(member.param): member for member in members}, self.param_groups
        if sum(len(group["params"]) for group in groups) > len(members) + len(self._calls.own.of(groups)):
            yield "param_groups have a parameter twice: take it out of one of the groups"
        trained = [
            (bucket.members, bucket.rule, self._calls.scale.divisors[i]) for i, bucket in enumerate(self._buckets)
        ]
        of_tables = self._calls.row_grads.each
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
            of_group = {id(self._team_of(known[id(p)])): known[id(p)] for p in group["params"] if id(p) in known}
            if len(of_group) > 1:
                one, other, *_ = of_group.values()
                yield (
                    f"param group {index} has parameters {one.quoted} and {other.quoted}, which groups with another "
                    "process_group had: build another optimizer"
                )

    def _misfit(self, then: Member, now: Member, rule: Rule, divisor: float | None, is_table: bool) -> str:
        group, another = self.param_groups[now.group], "build another optimizer"
        if self._rules.of(group) is not rule:
            return (
                f"its state is of the rule {rule.name!r}, and the group's is {self._rules.of(group).name!r}; {another}"
            )
        if self._divisor_of(group) != divisor:
            return f"its gradient is divided by another gradient_divisor; {another}"
        if is_sparse(group) is not is_table:
            return f"only one of its groups has sparse=True; {another}"
        known = "it is a table, of sparse=True" if is_table else "a zerox.Sparsity knows it"
        if (is_table or self.inside.sparsity is not None) and (now.number, now.group) != (then.number, then.group):
            return f"{known}, and stays where it was, {then.number} in group {then.group}; append what is new behind it"
        return ""

    def _team_of(self, member: Member) -> Team:
        return self._grads.teams.of_group[member.group]

    def _take_groups(self, now: Regrouped | None) -> None:
        """What any rank has found in its groups. Collective: ValueError on all ranks if they don't have the same."""
        assert self._ranks is not None
        members = (now or Regrouped(tuple(members_of(self.param_groups, self._calls.own.params)))).members
        known = {id(member.param): member for member in self.inside.members}
        self._ranks.check_same(list(self._lines(members, known)), way_out=SAME)
        self._calls.own.agree(self._ranks, known.values())
        if now is None:
            return
        added = [member for member in members if id(member.param) not in known]
        with self._ranks.refusals_told():
            for index, group in enumerate(self.param_groups):
                self._complete(group, index)
                for option, value in self._rules.defaults_of(group, self.defaults).items():
                    group.setdefault(option, value)
                self._check_group(group)
            check_params([m.name for m in members], [m.param for m in members])
        of_known = {index: self._team_of(m) for m in known.values() for index in _groups_of(m, members)}
        asked = [group.get(OF_GROUP) for group in self.param_groups]
        try:
            self._take_teams(of_known)
            self._move({id(member.param): member for member in members})
            for index in dict.fromkeys(member.group for member in added):
                self._adopt([member for member in added if member.group == index])
        except Exception:
            for group, own in zip(self.param_groups, asked, strict=True):
                group.update({OF_GROUP: own} if own is not None else {})
            raise
        self._note_groups()

    def _lines(self, members: Sequence[Member], known: Mapping[int, Member]) -> Iterator[str]:
        """What ranks compare. Parameters of a smaller team may have other names than those of the next one."""
        teams, groups = self._grads.teams, self.param_groups
        for index, group in enumerate(groups):
            shared = len(group["params"]) - len(self._calls.own.of([group]))
            yield f"{shared} parameters in param group {index}"
        for member in members:
            then = known.get(id(member.param))
            is_expert = teams.are_many or OF_GROUP in groups[member.group]
            name = "" if is_expert else f" {(then or member).name!r}"
            yield f"{f'parameter {then.number}' if then else 'a new parameter'}{name} in param group {member.group}"

    def _take_teams(self, known: Mapping[int, Team]) -> None:
        """``known``: of groups that have a parameter which had one. Collective: the others are asked."""
        teams, before = self._grads.teams, self._grads.teams.of_group
        teams.of_group = []
        try:
            for index, group in enumerate(self.param_groups):
                if index in known:
                    teams.of_group.append(known[index])
                else:
                    teams.take([group])
        except Exception:
            teams.of_group = before
            raise

    def _move(self, now: Mapping[int, Member]) -> None:
        """Parameters that were known are where the groups have them. On this rank alone."""
        for index, bucket in enumerate(self._buckets):
            moved = [now[id(member.param)] for member in bucket.members]
            if moved != bucket.members:
                bucket.place(moved)
                self._grads.refresh_segments(index)
        for each in self._calls.row_grads.each:
            each.table.member = now[id(each.table.param)]
        self._frozen = [now[id(member.param)] for member in self._frozen if id(member.param) in now]
        self._calls.scale.of_groups = [self._divisor_of(group) for group in self.param_groups]
        self._update.regroup(self.param_groups)


def _has_same(group: Mapping[str, Any], seen: list[Tensor]) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and C.has_same_objects(params, seen)


def _named(groups: Sequence[dict[str, Any]], known: Mapping[int, Member], apart: Collection[int]) -> Iterator[Member]:
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
