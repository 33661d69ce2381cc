"""Param groups that fewer ranks have than the optimizer, such as experts: Note [Subgroups] in csrc/buckets/bucket.h."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerox import _C as C
from zerox.ranks.axes import Axis
from zerox.ranks.compared import first_difference, line_of
from zerox.ranks.group import NO_NEIGHBOURS, Ranks
from zerox.ranks.neighbours import Neighbours
from zerox.ranks.own_groups import same_ranks
from zerox.ranks.process_group import ALONE, GroupArgument, choose_grid, choose_group, reference_to, timeout_of
from zerox.ranks.roll_call import RollCall

OF_GROUP = "process_group"  # of a param group
Cut = tuple[tuple[int, ...], ...]  # subgroups that all ranks are cut into, as the default group numbers them


def own_group(group: dict[str, Any]) -> dict[str, Any]:
    """The same param group, from which take() may take something: the user's own keeps it."""
    return dict(group) if OF_GROUP in group else group


@dataclass(frozen=True)
class Subgroup:
    """The ranks that have the same values of some param groups, and add up their gradients.

    ``ranks``: as :class:`zerox.ranks.group.Ranks` of these only. ``exchange``: its place in the bucket manager, 0 for
    the subgroup of all. ``number``: which of the ``count`` subgroups that the ranks are cut into it is. ``members``:
    the optimizer's ranks that are in it; empty for the subgroup of all.
    """

    ranks: Ranks
    members: tuple[int, ...] = ()
    exchange: int = 0
    number: int = 0
    count: int = 1

    @property
    def rank(self) -> int:
        """Which shard of its buckets is this rank's."""
        return self.ranks.shard_of(self.ranks.rank)

    def number_of(self, rank: int) -> int | None:
        """What the optimizer's ``rank`` is here; None if it is in another subgroup."""
        if not self.members:
            return rank
        return self.members.index(rank) if rank in self.members else None

    def broadcast_own(self, tensor: Tensor, what: str) -> None:
        """The first rank's values, in place, unless this is the subgroup of all. Collective over the subgroup."""
        if self.exchange > 0:
            self.ranks.broadcast_values(tensor, what)

    def for_manager(self) -> C.Subgroup:
        return C.Subgroup(
            exchange=self.exchange, rank=self.rank, world=self.ranks.size, number=self.number, count=self.count
        )


class Subgroups:
    """``of_group``: the subgroup of each param group. Subgroups that cut the ranks alike share what they communicate
    over.
    """

    def __init__(self, ranks: Ranks, manager: C.BucketManager) -> None:
        self.ranks = ranks
        self.manager = manager
        self.all = Subgroup(ranks)
        self.made: dict[Cut, Subgroup] = {}
        self.of_group: list[Subgroup] = []

    @property
    def are_many(self) -> bool:
        return bool(self.made)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which subgroup this rank is in, of each cut."""
        return tuple(subgroup.number for subgroup in self.made.values())

    def by_name(self, groups: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Of parameters in smaller subgroups, by the param group of each: the cut, and which of its subgroups."""
        subgroups = {name: self.of_group[group] for name, group in groups.items()}
        return {name: (subgroup.exchange, subgroup.number) for name, subgroup in subgroups.items() if subgroup.exchange}

    def first_of_others(self, rank: int) -> list[int]:
        """One rank of each subgroup that ``rank`` is not in, in order."""
        firsts = {min(subgroup) for cut in self.made for subgroup in self._as_ours(cut) if rank not in subgroup}
        return sorted(firsts)

    def take(self, groups: Sequence[dict[str, Any]]) -> None:
        """Makes the subgroups of new param groups, and takes their arguments out of them. Collective.

        ValueError on all ranks, naming the param group, for a group that cuts the ranks otherwise than into subgroups.
        """
        first = len(self.of_group)
        asked = {i: group.pop(OF_GROUP, None) for i, group in enumerate(groups, first)}
        with self.ranks.refusals_told():
            own = {i: self._numbers(each, f"param group {i}") for i, each in asked.items() if each is not None}
        self.ranks.check_same([f"a process_group in param groups {list(own)}"])
        self.of_group += [self.all] * len(groups)
        everyone = [json.loads(each) for each in self.ranks.all_gather_text(json.dumps(own))] if own else []
        for index in own:
            cut = _cut_of([each[str(index)] for each in everyone], self._all_numbers, f"param group {index}")
            if len(cut) > 1:
                self.of_group[index] = self.made[cut] = self.made.get(cut) or self._make(cut, asked[index])

    def forget_after(self, count: int) -> None:
        """Of param groups that were refused."""
        del self.of_group[count:]

    def check_same(self, lines: Mapping[int, Sequence[str]]) -> None:
        """ValueError on all ranks, naming the first that differs, unless the ranks of each subgroup pass the same lines
        for the param groups that are theirs. Collective."""
        if not self.are_many:
            return
        mine = {group: list(said) for group, said in sorted(lines.items()) if self.of_group[group].exchange}
        own = [[(group, self.of_group[group].number), said] for group, said in mine.items()]
        first: dict[object, tuple[int, list[str]]] = {}
        for rank, text in enumerate(self.ranks.all_gather_text(json.dumps(own))):
            for place, said in json.loads(text):
                known = first.setdefault(tuple(place), (rank, said))
                if (index := first_difference(known[1], said)) is not None:
                    one, other = line_of(known[1], index), line_of(said, index)
                    raise ValueError(f"zerox: ranks must agree: rank {known[0]} has {one}; rank {rank} has {other}")

    def _as_ours(self, cut: Cut) -> list[tuple[int, ...]]:
        """With the ranks' numbers in the optimizer's group."""
        own = self._all_numbers
        return [tuple(own.index(each) for each in subgroup) for subgroup in cut]

    @property
    def _all_numbers(self) -> list[int]:
        given = self.ranks.given
        return [0] if given is None else dist.get_process_group_ranks(given)

    def _numbers(self, argument: GroupArgument, of: str) -> list[int]:
        try:
            if choose_grid(argument) is not None:
                raise ValueError('process_group: a param group\'s has one axis, as mesh["edp"]')
            group = choose_group(argument)
        except ValueError as error:
            raise ValueError(f"{of}: {error}") from None
        if argument == ALONE:
            return [self._all_numbers[self.ranks.rank]]
        return self._all_numbers if group is None else dist.get_process_group_ranks(group)

    def _make(self, cut: Cut, argument: GroupArgument) -> Subgroup:
        ranks, subgroups = self.ranks, self._as_ours(cut)
        number = next(i for i, subgroup in enumerate(subgroups) if ranks.rank in subgroup)
        members = subgroups[number]
        if len(members) == 1:
            made = replace(ranks, rank=0, size=1, data=None, control=None, neighbours=NO_NEIGHBOURS, on_mesh=())
        else:
            group = choose_group(argument)
            assert group is not None
            made = self._connect(group, members)
        axis = ranks.axis_for_manager(Axis(made.data, members, ()))
        exchange = self.manager.add_subgroup(axis, ranks.failure_detector)
        return Subgroup(made, members, exchange, number, len(cut))

    def _connect(self, group: dist.ProcessGroup, members: tuple[int, ...]) -> Ranks:
        """Ranks wait for each other as long as in the optimizer's own group, whatever this one's timeout is."""
        ranks = self.ranks
        assert ranks.given is not None
        assert ranks.failure_detector is not None
        roll_call = RollCall(None, group.rank(), group.size(), dist.default_pg_timeout)
        data = same_ranks(group, ranks.backend, roll_call, timeout_of(ranks.given, ranks.backend))
        control = data
        if ranks.control is not ranks.data:
            control = same_ranks(group, "gloo", roll_call, timeout_of(ranks.given, "gloo"))
        for each in {control} if ranks.backend != "gloo" else {control, data}:
            ranks.failure_detector.add_group(each)
        processes = ranks.neighbours.processes
        near = Neighbours(tuple(processes[each] for each in members) if processes else ())
        made = replace(ranks, rank=group.rank(), size=group.size(), data=data, control=control)
        return replace(made, to_given=reference_to(group), neighbours=near, on_mesh=())


def _cut_of(of_ranks: Sequence[list[int]], numbers: Sequence[int], group: str) -> Cut:
    """The subgroups, from each rank's own. ValueError unless they cut the ranks, and each rank has its own.

    ``numbers``: of the optimizer's ranks in the default group.
    """
    found = dict(zip(numbers, of_ranks, strict=True))
    for rank, subgroup in found.items():
        called = f"{group}: the process_group of rank {rank}, of ranks {subgroup},"
        if outside := [each for each in subgroup if each not in found]:
            raise ValueError(
                f"{called} has rank {outside[0]}, which the optimizer's own process_group lacks: each rank of that "
                "belongs to one sub-group of it"
            )
        if rank not in subgroup:
            raise ValueError(f"{called} does not have it: each rank belongs to one sub-group")
        if other := [each for each in subgroup if found[each] != subgroup]:
            raise ValueError(
                f"{called} has rank {other[0]}, whose own is of ranks {found[other[0]]}: each rank belongs to one "
                "sub-group"
            )
    return tuple(dict.fromkeys(tuple(subgroup) for subgroup in found.values()))
