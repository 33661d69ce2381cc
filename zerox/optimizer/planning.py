"""Makes the plan of an optimizer's new parameters, from tensors and options: zerox/plan/plan.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket, Member
from zerox.memory.flat import dense_strides
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.memory.row_table import is_sparse
from zerox.options import OptimizerOptions, Planned
from zerox.plan.buckets import BucketPlan, loads_in
from zerox.plan.owners import Load
from zerox.plan.plan import Plan, TablePlan, TrainedPlan, Wire
from zerox.plan.state_layout import layout_of_state
from zerox.ranks.dtensors import local_of
from zerox.ranks.model_axes import ModelAxes
from zerox.ranks.subgroups import Subgroup, Subgroups
from zerox.rules.of_groups import Rules
from zerox.rules.rule import MASTERS


class Given(NamedTuple):
    """A parameter, with its param group. ``subgroup``: which ranks have it, 0 for all of them. ``replicated_over``:
    model axes whose ranks have the same one."""

    name: str
    param: Tensor
    group: Mapping[str, Any]
    subgroup: int = 0
    replicated_over: tuple[int, ...] = ()


class Around(NamedTuple):
    """What a plan depends on beside parameters. ``subgroup_sizes``: how many ranks have what is a subgroup's, all of
    them first. ``shards_params``: ranks keep parts of parameters, frozen ones too. ``loads``: by subgroup, what its
    ranks own already of parameters that lie whole on one; empty: nothing."""

    options: OptimizerOptions
    rules: Rules
    backend: str
    subgroup_sizes: Sequence[int]
    shards_params: bool
    loads: Sequence[Sequence[Load]] = ()


def subgroups_in_order(subgroups: Subgroups) -> list[Subgroup]:
    """As a plan numbers them."""
    return [subgroups.all, *subgroups.made.values()]


def loads_of(buckets: Sequence[Bucket], subgroups: Subgroups) -> list[list[Load]]:
    """What ranks own of parameters that lie whole on one, by subgroup and by rank."""
    by_subgroup: dict[int, list[BucketPlan]] = {}
    for bucket in buckets:
        by_subgroup.setdefault(id(subgroups.of_group[bucket.members[0].group]), []).append(bucket.plan)
    return [loads_in(by_subgroup.get(id(each), []), each.ranks.size) for each in subgroups_in_order(subgroups)]


def plan_members(
    around: Around,
    subgroups: Subgroups,
    model: ModelAxes,
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
) -> Plan:
    """Of an optimizer's own parameters."""
    in_order = subgroups_in_order(subgroups)

    def given(member: Member) -> Given:
        subgroup = next(number for number, each in enumerate(in_order) if each is subgroups.of_group[member.group])
        over = model.replicated_over(member.param)
        return Given(member.name, member.param, groups[member.group], subgroup, over)

    return make_plan(around, [given(member) for member in members])


def make_plan(around: Around, given: Sequence[Given]) -> Plan:
    """Buckets are in reverse order of registration, as far as parameters of different buckets have one."""
    trained = [place for place, each in enumerate(given) if each.param.requires_grad]
    still = [place for place, each in enumerate(given) if not each.param.requires_grad]
    buckets = list(_trained(around, given, [place for place in trained if not is_sparse(given[place].group)]))
    frozen: list[BucketPlan] = []
    if around.shards_params:
        of_frozen = [given[place] for place in still]
        shown = [Planned(each.name, local_of(each.param), replicated_over=each.replicated_over) for each in of_frozen]
        frozen = _planned(around, shown, still, 0)
    return Plan(
        names=tuple(each.name for each in given),
        trained=tuple(sorted(buckets, key=lambda each: -max(each.bucket.params))),
        frozen=tuple(frozen),
        tables=tuple(_table(around, given[place], place) for place in trained if is_sparse(given[place].group)),
        loose_bytes=0 if around.shards_params else sum(local_of(given[place].param).nbytes for place in still),
    )


def _trained(around: Around, given: Sequence[Given], dense: Sequence[int]) -> Iterator[TrainedPlan]:
    options, rules = around.options, around.rules
    for subgroup in range(len(around.subgroup_sizes)):
        places = [place for place in dense if given[place].subgroup == subgroup]
        shown: list[Planned] = []
        for each in (given[place] for place in places):
            rule, divisor, param = rules.of(each.group), options.divisor_of(each.group), local_of(each.param)
            whole = rule.cost(param.shape, each.group), rule.slices(param.shape, dense_strides(param))
            shown.append(Planned(each.name, param, rule.name, divisor, each.replicated_over, *whole))
        for bucket in _planned(around, shown, places, subgroup):
            groups, first = [given[place].group for place in bucket.params], given[bucket.params[0]]
            of_bucket, param = rules.of(first.group), local_of(first.param)
            specs = [*of_bucket.wanted_states(groups), *options.masters(param.dtype)]
            kept = tuple(of_bucket.kept(spec, bucket.state_form) for spec in specs)
            shapes = [tuple(local_of(given[place].param).shape) for place in bucket.params]
            layouts = {
                spec.key: layout_of_state(bucket.layout, shapes, [of_bucket.shape_of(spec, shape) for shape in shapes])
                for spec in specs
                if spec not in MASTERS
            }
            wire, divisor = _wire(options, param), options.divisor_of(first.group)
            yield TrainedPlan(bucket, kept, wire, subgroup, divisor, layouts)


def _planned(around: Around, shown: Sequence[Planned], places: Sequence[int], subgroup: int) -> list[BucketPlan]:
    """Buckets of those that are at these ``places`` among all."""
    loads = around.loads[subgroup] if around.loads else None
    found = around.options.plan(shown, around.backend, around.subgroup_sizes[subgroup], loads)
    return [replace(plan, params=tuple(places[i] for i in plan.params)) for plan in found]


def _wire(options: OptimizerOptions, param: Tensor) -> Wire:
    wire, grads = options.wire_dtype(param.dtype), grad_dtype_of(param, options.accumulate_dtype)
    return Wire(
        grad_itemsize=grads.itemsize,
        itemsize=wire.itemsize,
        sum_itemsize=torch.promote_types(wire, torch.float32).itemsize,
        is_grads=wire == grads,
        is_wider=torch.promote_types(grads, wire) != grads,
    )


def _table(around: Around, given: Given, place: int) -> TablePlan:
    options, rule, param = around.options, around.rules.of(given.group), local_of(given.param)
    specs = [*rule.wanted_states([given.group]), *options.masters(param.dtype)]
    kept = tuple(rule.kept(spec, options.state_form(param)) for spec in specs)
    return TablePlan(place, param.shape[0], param.shape[1], param.itemsize, kept)
