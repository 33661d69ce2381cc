"""How parameters come to an optimizer: those that are trained get buckets, or are tables; the others are watched."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket, FrozenBucket, Member, rooms
from zerox.memory.flat import give_out
from zerox.memory.grad_dtype import Widened
from zerox.optimizer.core import Core
from zerox.optimizer.planning import Around, plan_members, subgroups_in_order
from zerox.optimizer.terms import check_axes, check_model, check_pairs, check_terms, words_of_calls
from zerox.plan.plan import Plan
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
        check_pairs(core.options, core.grads.subgroups, groups, known, calls)
        core.calls.own.check(groups, core.rules, core.options, bool(core.grads.model.axes))

    def adopt(self, members: Sequence[Member]) -> None:
        """Makes buckets for the trainable ones of ``members``; watches the others. Collective."""
        core, model = self.core, self.core.grads.model
        ranks, groups = core.ranks, core.groups.param_groups
        with ranks.refusals_told():
            self.check_pairs(members, core.overlap is not None)
            check_axes(model, members)
            check_rows(groups, members, core.grads, core.gather.shards_params)
        check_terms(core.options, core.grads.subgroups, groups, members)
        core.calls.own.agree(ranks, [*core.members, *members])
        with ranks.failure_told():
            check_model(model, ranks, core.options, groups, members)
            self._take_over(members)
        ranks.barrier("all have made their buckets")

    # ---- inside

    def _take_over(self, members: Sequence[Member]) -> None:
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
        frozen = self._take_still(plan, members)
        self.widened.take(member.param for member in trained)
        made = list(self._make_buckets(plan, members))
        core.calls.scale.of_groups = divisors
        core.grads.let_decide(decisions())
        core.gather.add_buckets(made, frozen, core.tables)
        if made and core.overlap is not None:
            core.overlap.learn_buckets()
        tables = [table for table in core.tables if id(table.param) in adopted]
        core.loading.take_adopted([bucket for _, bucket in made], tables)

    def _plan(self, members: Sequence[Member]) -> Plan:
        core, subgroups = self.core, self.core.grads.subgroups
        sizes = [subgroup.ranks.size for subgroup in subgroups_in_order(subgroups)]
        around = Around(core.options, core.rules, subgroups.ranks.backend, sizes, core.gather.shards_params)
        return plan_members(around, subgroups, core.grads.model, core.groups.param_groups, members)

    def _take_still(self, plan: Plan, members: Sequence[Member]) -> list[FrozenBucket]:
        """Parameters that are not trained get their ranks' first values, once there is room for all buckets."""
        core, subgroups, model = self.core, self.core.grads.subgroups, self.core.grads.model
        of_trained = rooms([each.bucket for each in plan.trained], members)
        core.gather.check_room([*of_trained, *rooms(plan.frozen, members), *core.calls.row_grads.rooms()])
        still = [member for member in members if not member.param.requires_grad]
        planned = [(each, [members[place] for place in each.params]) for each in plan.frozen]
        frozen = core.gather.take_frozen([m for m in still if subgroups.of_group[m.group] is subgroups.all], planned)
        left = {id(member.param) for bucket in frozen if bucket.buffer.left is not None for member in bucket.members}
        homes = {id(m.param): bucket.buffer.home(slot) for bucket in frozen for slot, m in enumerate(bucket.members)}
        for member in [each for each in still if id(each.param) not in left]:
            values = homes.get(id(member.param), member.local)
            subgroups.of_group[member.group].broadcast_own(values, f"parameter '{member.name}'")
            model.broadcast_values(values, model.replicated_over(member.param))
        for bucket in frozen:
            give_out(bucket.buffer.slots())
            bucket.buffer.start()
        return frozen

    def _make_buckets(self, plan: Plan, members: Sequence[Member]) -> Iterator[tuple[int, Bucket]]:
        """Buckets with their values, each with its index."""
        core, groups, model = self.core, self.core.groups.param_groups, self.core.grads.model
        subgroups = subgroups_in_order(core.grads.subgroups)
        for each in plan.trained:
            inside, subgroup = [members[place] for place in each.bucket.params], subgroups[each.subgroup]
            rule = core.rules.of(groups[inside[0].group])
            specs = [rule.spec_of(kept.key) for kept in each.kept]
            bucket = Bucket(each.bucket, inside, subgroup.rank, rule, specs, core.gather.make_buffer)
            if bucket.buffer.left is None:
                subgroup.ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(len(core.buckets))}")
                model.broadcast(bucket.buffer.flat, model.replicated_over(inside[0].param))
            give_out(bucket.buffer.slots())
            bucket.start()
            index = core.grads.add_bucket(bucket, each.divisor, subgroup)
            core.calls.scale.add_bucket(each.divisor)
            core.buckets.append(bucket)
            core.update.add_bucket(bucket, groups)
            yield index, bucket
