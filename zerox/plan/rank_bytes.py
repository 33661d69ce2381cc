"""The bytes that a plan takes on one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zerox.plan.buckets import loads_in
from zerox.plan.kept import mask_bytes, storage_bytes
from zerox.plan.layout import Layout
from zerox.plan.owners import slowest_over_mean
from zerox.plan.peak import AHEAD_IF_PACED, Flow, peak_alone, peak_of_sharded, peak_of_whole, peak_on_streams
from zerox.plan.plan import Plan, TrainedPlan
from zerox.plan.resident import resident_limit
from zerox.plan.span import Span
from zerox.plan.stage import SHARDED, Stage


@dataclass(frozen=True)
class Site:
    """Where a plan is trained. ``near``: how many ranks can read each other's gradients. ``on_host``: parameters lie in
    the host's memory. ``exchange``: what it comes to. ``mesh``: (replicate, shard), if both are more than one.
    ``shard``: of each bucket, whose bytes are asked for: they differ where parameters have owners."""

    stage: Stage
    backend: str
    world_size: int
    near: int
    on_host: bool
    exchange: str
    mesh: tuple[int, int] | None = None
    shard: int = 0

    @property
    def shards_grads(self) -> bool:
        return self.stage.grads is SHARDED

    @property
    def shards_params(self) -> bool:
        return self.stage.params is SHARDED and self.world_size > 1

    @property
    def has_streams(self) -> bool:
        """Whether messages have streams of their own."""
        return self.backend == "nccl" and self.world_size > 1

    @property
    def sends_messages(self) -> bool:
        """Single ones, from where a gradient lies, and to one rank each."""
        return self.backend == "gloo" and self.exchange != "native"


def heaviest_shard(plan: Plan) -> int:
    """The one of which all buckets together have most elements."""
    layouts = [bucket.layout for bucket in plan.buckets]
    if not any(layout.has_owners for layout in layouts):
        return 0
    shards = range(max(layout.world_size for layout in layouts))
    numels = [sum(_own(layout, shard).numel for layout in layouts) for shard in shards]
    return numels.index(max(numels))


def owned_places(plan: Plan, shard: int) -> list[tuple[int, int | None]]:
    """The parameters that lie whole in this shard, and those of which some slices do, with how many these are."""
    found: list[tuple[int, int | None]] = []
    for bucket in (each.bucket for each in plan.trained if each.bucket.layout.has_owners):
        layout, own = bucket.layout, shard % bucket.layout.world_size
        if layout.slices is not None:
            found.append((bucket.params[0], layout.slices[own]))
        for place, owner in zip(bucket.params, layout.owners or (), strict=False):
            if owner == own:
                found.append((place, None))
    return found


def fullest_rank(plan: Plan, site: Site) -> int | None:
    """The rank that has the ``site``'s shard of each bucket. None: no parameters have owners, so all have as much."""
    if site.world_size == 1 or not any(bucket.layout.has_owners for bucket in plan.buckets):
        return None
    if site.mesh is None:
        return site.shard
    replicate, shard = site.mesh
    inner, outer = divmod(site.shard, replicate)  # shards of ranks that differ in the outer axis only lie together
    return outer * shard + inner


def slowest_rank(plan: Plan, world_size: int) -> float | None:
    """Its work on parameters that lie whole on one rank, over the mean of all ranks. None: there are none."""
    buckets = [each.bucket for each in plan.trained if each.bucket.layout.world_size == world_size]
    if world_size == 1 or not any(bucket.layout.has_owners for bucket in buckets):
        return None
    return slowest_over_mean(loads_in(buckets, world_size))


def _own(layout: Layout, shard: int, together: int = 1) -> Span:
    """A shard, or those that are kept ``together`` with it. A subgroup has fewer than all ranks have."""
    first = shard % layout.world_size // together * together
    return Span(layout.shard_starts[first], layout.shard_starts[first + together])


def parameter_bytes(plan: Plan, site: Site, resident_mb: float | None, open_bytes: int = 0) -> int:
    """With what of sharded ones may be whole: the limit, or ``open_bytes`` if these are more. ValueError as
    resident_limit()."""
    if not site.shards_params:
        in_buckets = sum(each.nbytes for each in plan.buckets)
        return plan.loose_bytes + in_buckets + sum(table.nbytes for table in plan.tables)
    together = site.mesh[0] if site.mesh is not None else 1  # parameters are sharded over the other axis only
    own = sum(table.most_rows(site.world_size) * table.width * table.itemsize for table in plan.tables)
    for bucket in plan.buckets:
        own += storage_bytes(_own(bucket.layout, site.shard, together).numel, bucket.itemsize, site.on_host, 1)
    by_rows = plan.tables if site.on_host else ()  # elsewhere lookups give a table memory as a whole
    whole = [(f"table {plan.names[table.place]}", table.nbytes) for table in plan.tables if not by_rows]
    whole += [(f"the bucket of {plan.names[each.params[0]]}", each.nbytes) for each in plan.buckets]
    of_tables = sum(table.nbytes for table in by_rows)
    limit = resident_limit(whole, resident_mb, of_tables)
    return plan.loose_bytes + own + max(open_bytes, int(min(limit, sum(nbytes for _, nbytes in whole) + of_tables)))


def state_bytes(plan: Plan, site: Site, masked: Collection[int]) -> tuple[int, int]:
    """Of masters, and of all else. ``masked``: the places of parameters that have a mask."""
    masters, others = 0, 0
    for table in plan.tables:
        num_rows = table.most_rows(site.world_size)
        masters += num_rows * sum(kept.row_bytes(table.width) for kept in table.kept if kept.is_master)
        others += num_rows * sum(kept.row_bytes(table.width) for kept in table.kept if not kept.is_master)
    for each in plan.trained:
        for kept in each.kept:
            nbytes = kept.nbytes(_own(each.layout_of(kept), site.shard).numel, site.on_host)
            masters, others = masters + nbytes * kept.is_master, others + nbytes * (not kept.is_master)
        numel = _own(each.bucket.layout, site.shard).numel
        others += 0 if set(each.bucket.params).isdisjoint(masked) else mask_bytes(numel)
    return masters, others


def flow_of(each: TrainedPlan, site: Site) -> Flow:
    """A bucket's gradients from backward to the mean."""
    layout, wire = each.bucket.layout, each.wire
    num_zero_copy = _num_zero_copy(each, site)
    shard = _own(layout, site.shard).numel * wire.itemsize
    packed = layout.numel - sum(layout.numels_in_front(num_zero_copy)) + layout.world_size * layout.trailer_numel
    flat = packed * wire.itemsize
    zero_copy = sum(layout.numels[:num_zero_copy]) * wire.grad_itemsize
    received, reducing = _received(each, site) if layout.world_size > 1 else (0, 0)
    is_alone = site.world_size == 1  # then gradients are the mean
    return Flow(
        local=sum(layout.numels) * wire.grad_itemsize,
        flat=flat,
        zero_copy=zero_copy,
        received=received,
        shard=flat + zero_copy if is_alone else shard,
        whole=(sum(layout.numels) if is_alone else layout.numel) * wire.grad_itemsize,
        kept=shard if wire.is_wider else 0,
        last=max(layout.numels[num_zero_copy:], default=0) * wire.grad_itemsize,
        reducing=reducing,
    )


def peak_of(flows: Sequence[Flow], site: Site, keeps_up: bool) -> int:
    """Of gradients and their buffers. ``keeps_up``: the wire does with backward."""
    if site.world_size == 1:
        return peak_alone(flows, site.shards_grads)
    if not site.shards_grads:
        return peak_of_whole(flows, stalled=site.has_streams or not keeps_up)
    if site.has_streams:
        return peak_on_streams(flows)
    return peak_of_sharded(flows, 0 if keeps_up else AHEAD_IF_PACED if site.shards_params else None)


def _num_zero_copy(each: TrainedPlan, site: Site) -> int:
    """Large gradients stay where autograd left them."""
    divided_alone = each.bucket.layout.world_size == 1 and each.divisor not in (None, 1.0)
    is_taken = site.sends_messages or each.bucket.layout.world_size == 1
    stay = site.on_host and is_taken and each.wire.is_grads and not divided_alone and site.mesh is None
    return each.bucket.num_zero_copy if stay else 0


def _slice_numel(each: TrainedPlan, site: Site, together: int = 1) -> int:
    """Of this rank's slice, or of those of the ranks whose shards lie together with its own."""
    layout = each.bucket.layout
    return _own(layout, site.shard, together).numel + together * layout.trailer_numel


def _received(each: TrainedPlan, site: Site) -> tuple[int, int]:
    """What is received; and while it is reduced on a mesh, sums of that, what the other axis brings, and its sum.

    Sums are float32, and once more where they are rounded for the wire: see csrc/grads/two_level.cpp.
    """
    wire, size = each.wire, each.bucket.layout.world_size
    if site.mesh is None:
        beside = site.near if size == site.world_size else size if site.near == site.world_size else 1
        # Of a subgroup perhaps none is beside.
        return _num_slices(site, size, beside) * _slice_numel(each, site) * wire.itemsize, 0
    replicate, shard = site.mesh
    column, sum_bytes = _slice_numel(each, site, replicate), _slice_numel(each, site) * wire.sum_itemsize
    inner = _num_slices(site, shard, min(site.near, shard)) * column * wire.itemsize
    outer = _num_slices(site, replicate, max(1, site.near // shard)) * sum_bytes
    own = _own(each.bucket.layout, site.shard).numel
    rounded = own * wire.sum_itemsize if wire.sum_itemsize != wire.itemsize else 0
    return inner, outer + column * wire.sum_itemsize + sum_bytes + rounded


def _num_slices(site: Site, size: int, num_near: int) -> int:
    """One from each of the ranks whose gradients can't be read; of an all-to-all one from every rank; of the backend's
    own sum one, which is that."""
    if site.exchange == "native":
        return 1
    return size - num_near if site.sends_messages else size
