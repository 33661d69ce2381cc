"""How parameters come to an optimizer: those that are trained get buckets, or are tables; the others are watched."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket, FrozenBucket, Member, rooms
from zerox.memory.flat import give_out
from zerox.memory.grad_dtype import Widened
from zerox.optimizer.bucket_plans import plan_trained
from zerox.optimizer.core import Core
from zerox.optimizer.terms import check_axes, check_model, check_pairs, check_terms, words_of_calls
from zerox.options import Planned
from zerox.plan.buckets import BucketPlan
from zerox.ranks.holders import note_held
from zerox.ranks.subgroups import Subgroup
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
        still = [member for member in members if not member.param.requires_grad]
        adopted = {id(member.param) for member in trained}
        note_held(core.groups.optimizer, [m.param for m in members])
        known = {id(member.param): member for member in (*core.frozen, *members)}
        core.groups.frozen = [member for number, member in known.items() if number not in adopted]
        divisors = core.groups.divisors()
        dense = core.calls.take_tables(trained, groups, core.rules, core.options, divisors)
        plans = plan_trained(core.options, core.rules, core.grads.subgroups, core.grads.model, groups, dense)
        frozen = self._take_still(still, [*rooms([plan for plan, _ in plans], dense)])
        self.widened.take(member.param for member in trained)
        made = list(self._make_buckets(plans, dense))
        core.calls.scale.of_groups = divisors
        core.grads.let_decide(decisions())
        core.gather.add_buckets(made, frozen, core.tables)
        if plans and core.overlap is not None:
            core.overlap.learn_buckets()
        tables = [table for table in core.tables if id(table.param) in adopted]
        core.loading.take_adopted([bucket for _, bucket in made], tables)

    def _take_still(self, still: Sequence[Member], added: Sequence[tuple[str, int]]) -> list[FrozenBucket]:
        """Parameters that are not trained get their ranks' first values. ``added``: the room that others need."""
        core, subgroups, model = self.core, self.core.grads.subgroups, self.core.grads.model
        shared_out: list[Planned] = [(m.name, m.local, "", None, ()) for m in still if core.gather.shards_params]
        plans = core.options.plan(shared_out, subgroups.ranks.backend, subgroups.ranks.size)
        core.gather.check_room([*added, *rooms(plans, still), *core.calls.row_grads.rooms()])
        frozen = core.gather.take_frozen([m for m in still if subgroups.of_group[m.group] is subgroups.all], plans)
        for member in still:
            subgroups.of_group[member.group].broadcast_own(member.local, f"parameter '{member.name}'")
            model.broadcast_values(member.local, model.replicated_over(member.param))
        return frozen

    def _make_buckets(
        self, plans: Sequence[tuple[BucketPlan, Subgroup]], trained: Sequence[Member]
    ) -> Iterator[tuple[int, Bucket]]:
        """Buckets with their values, each with its index."""
        core, groups, model = self.core, self.core.groups.param_groups, self.core.grads.model
        for plan, subgroup in plans:
            inside = [trained[i] for i in plan.params]
            of_inside = [groups[m.group] for m in inside]
            rule, divisor = core.rules.of(of_inside[0]), core.options.divisor_of(of_inside[0])
            specs = [*rule.wanted_states(of_inside), *core.options.masters(inside[0].param.dtype)]
            bucket = Bucket(plan, inside, subgroup.rank, rule, specs, core.gather.make_buffer)
            subgroup.ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(len(core.buckets))}")
            model.broadcast(bucket.buffer.flat, model.replicated_over(inside[0].param))
            give_out(bucket.buffer.slots())
            bucket.start()
            index = core.grads.add_bucket(bucket, divisor, subgroup)
            core.calls.scale.add_bucket(divisor)
            core.buckets.append(bucket)
            core.update.add_bucket(bucket, groups)
            yield index, bucket
