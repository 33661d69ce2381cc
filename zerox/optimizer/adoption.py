"""How parameters come to an optimizer: those that are trained get buckets, or are tables; the others are watched."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing

from torch import Tensor

from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket, FrozenBucket, Member, rooms
from zerox.memory.flat import give_out
from zerox.memory.grad_dtype import Widened
from zerox.optimizer.core import Core
from zerox.optimizer.materialize import Materializer
from zerox.optimizer.owned import say_of_owned
from zerox.optimizer.planning import Around, loads_of, plan_members, subgroups_in_order
from zerox.optimizer.terms import check_axes, check_model, check_pairs, check_terms, words_of_calls
from zerox.plan.plan import Plan, TrainedPlan
from zerox.ranks.holders import note_held
from zerox.ranks.wrapped import decisions
from zerox.rows.row_refusals import check_rows


class Adoption:
    """Also of frozen parameters that were thawed: ranks make their buckets together, where they synchronize next."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.widened = Widened(core.options.accumulate_dtype)
        weakref.finalize(core.groups.optimizer, self.widened.give_back).atexit = False
        core.phases.before_sync("frozen", self._before_sync)
        core.phases.adopting("frozen", self._adopt_unfrozen)

    def _before_sync(self, visit: Visit) -> None:
        visit.unfrozen = [member for member in self.core.groups.frozen if member.param.requires_grad]
        visit.has_news = visit.has_news or bool(visit.unfrozen)

    def _adopt_unfrozen(self, _: Visit) -> None:
        """But for those that came with their groups just now."""
        self.adopt([member for member in self.core.groups.frozen if member.param.requires_grad])

    def check_pairs(self, added: Sequence[Member], overlaps: bool, joins: bool = False) -> None:
        """ValueError for what does not go together. On this rank alone."""
        core, groups = self.core, self.core.groups.param_groups
        known = [m for bucket in core.buckets for m in bucket.members], [*added, *core.frozen]
        calls = words_of_calls(overlaps, joins, masks=joins and core.sparsity is not None)
        check_pairs(core.options, core.grads.subgroups, groups, known, calls, core.rules.default.name)
        core.calls.own.check(groups, core.rules, core.options, bool(core.grads.model.axes))

    def adopt(self, members: Sequence[Member], materializer: Materializer | None = None) -> None:
        """Makes buckets for the trainable ones of ``members``; watches the others. Collective. ``materializer``: gives
        those on meta their first values."""
        core, model = self.core, self.core.grads.model
        ranks, groups = core.ranks, core.groups.param_groups
        with ranks.refusals_told():
            self.check_pairs(members, core.overlap is not None)
            check_axes(model, members)
            check_rows(groups, members, core.grads, core.gather.shards_params)
            if materializer is not None:
                materializer.look()
        check_terms(core.options, core.grads.subgroups, groups, members)
        core.calls.own.agree(ranks, [*core.members, *members])
        with ranks.failure_told():
            check_model(model, ranks, core.options, groups, members)
            self._take_over(members, materializer)
        ranks.barrier("all have made their buckets")

    # ---- inside

    def _take_over(self, members: Sequence[Member], materializer: Materializer | None) -> None:
        core, groups = self.core, self.core.groups.param_groups
        trained = [member for member in members if member.param.requires_grad]
        adopted = {id(member.param) for member in trained}
        note_held(core.groups.optimizer, [m.param for m in members])
        known = {id(member.param): member for member in (*core.frozen, *members)}
        core.groups.frozen = [member for number, member in known.items() if number not in adopted]
        divisors = core.groups.divisors()
        plan = self._plan(members)
        planned = [*(each.bucket for each in plan.trained), *plan.frozen]
        core.gather.find_left([([members[place].local for place in each.params], each.layout) for each in planned])
        core.calls.take_tables([(members[table.place], table) for table in plan.tables], groups, core.rules, divisors)
        self._check_room(plan, members, materializer)
        self._give_loose(plan, members)
        self.widened.take(member.param for member in trained)
        made = self._make_buckets(plan, members, materializer)
        core.calls.scale.of_groups = divisors
        core.grads.let_decide(decisions())
        if made and core.overlap is not None:
            core.overlap.learn_buckets()
        tables = [table for table in core.tables if id(table.param) in adopted]
        core.loading.take_adopted(made, tables)
        say_of_owned(core)

    def _plan(self, members: Sequence[Member]) -> Plan:
        core, subgroups = self.core, self.core.grads.subgroups
        sizes = [subgroup.ranks.size for subgroup in subgroups_in_order(subgroups)]
        loads = loads_of(core.buckets, subgroups)
        around = Around(core.options, core.rules, subgroups.ranks.backend, sizes, core.gather.shards_params, loads)
        return plan_members(around, subgroups, core.grads.model, core.groups.param_groups, members)

    def _check_room(self, plan: Plan, members: Sequence[Member], materializer: Materializer | None) -> None:
        of_trained = rooms([each.bucket for each in plan.trained], members)
        tables = self.core.calls.row_grads.rooms()
        limit = self.core.gather.check_room([*of_trained, *rooms(plan.frozen, members), *tables])
        if materializer is not None:
            materializer.check_room(plan, members, limit)

    def _give_loose(self, plan: Plan, members: Sequence[Member]) -> None:
        """Parameters that are not trained, and lie in no bucket, get their ranks' first values."""
        subgroups = self.core.grads.subgroups
        in_buckets = {place for each in plan.frozen for place in each.params}
        still = [m for place, m in enumerate(members) if not m.param.requires_grad and place not in in_buckets]
        loose = [member for member in still if not member.param.is_meta]
        for member in loose:
            if subgroups.of_group[member.group] is subgroups.all:
                self.core.ranks.broadcast_values(member.local, f"parameter '{member.name}'")
            self._give_along_axes(member, member.local)

    def _give_along_axes(self, member: Member, values: Tensor) -> None:
        """Values of one parameter: to the ranks that share it, if these are not all, and along other axes."""
        subgroups, model = self.core.grads.subgroups, self.core.grads.model
        subgroups.of_group[member.group].broadcast_own(values, f"parameter '{member.name}'")
        model.broadcast_values(values, model.replicated_over(member.param))

    def _make_buckets(self, plan: Plan, members: Sequence[Member], materializer: Materializer | None) -> list[Bucket]:
        """Returns those that are trained. Each, frozen ones too, has its values before the next one has any."""
        core, made = self.core, []
        inside = [(each, [members[place] for place in each.params]) for each in plan.frozen]
        frozen = [FrozenBucket(each, those, core.gather.make_buffer) for each, those in inside]
        trained, num_frozen = iter(plan.trained), 0
        without_values = self._without_values(plan, members)
        materialize = None if materializer is None else materializer.materialize
        with closing(core.gather.add_buckets(without_values, frozen, core.tables, materialize)) as new:
            for bucket in new:
                if isinstance(bucket, Bucket):
                    self._adopt_trained(bucket, next(trained))
                    made.append(bucket)
                else:
                    self._adopt_frozen(bucket, num_frozen)
                    num_frozen += 1
        return made

    def _without_values(self, plan: Plan, members: Sequence[Member]) -> Iterator[Bucket]:
        """Trained ones that have this rank's values at most, and no state."""
        core, subgroups = self.core, subgroups_in_order(self.core.grads.subgroups)
        for each in plan.trained:
            inside = [members[place] for place in each.bucket.params]
            rule = core.rules.of(core.groups.param_groups[inside[0].group])
            yield Bucket(each.bucket, inside, subgroups[each.subgroup].rank, rule, (), core.gather.make_buffer)

    def _adopt_trained(self, bucket: Bucket, plan: TrainedPlan) -> None:
        core, model = self.core, self.core.grads.model
        subgroup = subgroups_in_order(core.grads.subgroups)[plan.subgroup]
        if not bucket.buffer.is_shared_out:
            subgroup.ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(len(core.buckets))}")
            model.broadcast(bucket.buffer.flat, model.replicated_over(bucket.members[0].param))
        give_out(bucket.buffer.slots())
        for kept in plan.kept:
            bucket.keep(bucket.rule.spec_of(kept.key))
        bucket.start()
        core.grads.add_bucket(bucket, plan.divisor, subgroup)
        core.calls.scale.add_bucket(plan.divisor)
        core.buckets.append(bucket)
        core.update.add_bucket(bucket, core.groups.param_groups)

    def _adopt_frozen(self, bucket: FrozenBucket, index: int) -> None:
        buffer = bucket.buffer
        if not buffer.is_shared_out:
            self.core.ranks.broadcast(buffer.flat, f"the parameters of {bucket.describe(index)}")
            for slot, member in enumerate(bucket.members):
                self._give_along_axes(member, buffer.home(slot))
        give_out(buffer.slots())
        buffer.start()
