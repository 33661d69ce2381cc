"""Which parameters share a bucket."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from zerox.plan.form import FLOAT32, Form
from zerox.plan.layout import Layout
from zerox.plan.owners import Load, owners
from zerox.plan.span import SHARD_ALIGN

MIB = 1 << 20
# torch's allocator aligns tensors like this too. For others, matrix kernels may choose another path, and other bits,
# and the choice of buckets would show in the results.
START_ALIGN_BYTES = 64
# From this size on, a gradient's own message (some 50 us) costs less than its copy into the bucket (some 0.4 ns a
# byte), unless a rank's slice is so small that messages dominate.
ZERO_COPY_BYTES = 256 * 1024
ZERO_COPY_SLICE_BYTES = 1 * MIB


@dataclass(frozen=True)
class ParamSpec:
    """What a plan knows of a parameter: ``dtype`` is any hashable name of its dtype, ``itemsize`` its bytes an element.

    ``state_form``: how its state is stored; ``grad_dtype``: a name of its gradient's dtype, if that is another one;
    ``rule``: the name of its update rule; ``divisor``: of the ranks' sum of its gradients, None for their number;
    ``replicated_over``: model axes whose ranks have the same parameter. In buckets of their own these lie alike on all
    of them, whatever else these ranks have. ``on_meta``: it has no memory yet. ``cost``: of its update, in any unit, if
    it is updated as a whole and so lies whole on one rank; None: each rank updates a part of it. ``slices``: how many
    equal ones it has, one behind the other in memory, that are updated each by itself.
    """

    name: str
    numel: int
    dtype: str
    itemsize: int
    state_form: Form = FLOAT32
    grad_dtype: str = ""
    rule: str = ""
    divisor: float | None = None
    replicated_over: tuple[int, ...] = ()
    on_meta: bool = False
    cost: int | None = None
    slices: int = 1

    @property
    def is_whole(self) -> bool:
        return self.cost is not None

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What all parameters of a bucket have in common."""
        of_grads = self.grad_dtype, self.divisor, self.replicated_over
        return self.dtype, self.state_form, self.rule, *of_grads, self.on_meta, self.is_whole

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def may_be_divided(self, world_size: int, cap_bytes: int) -> bool:
        """Whether all ranks get slices: with a bucket to itself, and no block of 256 elements that two ranks share."""
        is_long = self.nbytes > cap_bytes and 1 < world_size <= self.slices
        return is_long and self.numel % (self.slices * SHARD_ALIGN) == 0


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its parameters (as indices into the planned list), and their layout.

    The first ``num_zero_copy`` are large: if the exchange sends single messages, or there is no exchange, their
    gradients need not be packed. ``costs``: of their updates, if they lie whole on one rank each, or slices of one do.
    """

    params: tuple[int, ...]
    dtype: str
    itemsize: int
    layout: Layout
    state_form: Form = FLOAT32
    num_zero_copy: int = 0
    costs: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all parameters, padding too."""
        return self.layout.numel * self.itemsize


def loads_in(plans: Iterable[BucketPlan], world_size: int) -> list[Load]:
    """What each rank owns in these buckets of parameters that lie whole on one."""
    loads = [Load()] * world_size
    for plan in plans:
        for owner, cost, numel in zip(plan.layout.owners or (), plan.costs, plan.layout.numels, strict=False):
            loads[owner] = loads[owner].plus(cost, numel)
        for rank, count in enumerate(plan.layout.slices or ()):
            cost = sum(plan.costs) * count // sum(plan.layout.slices or ())
            loads[rank] = loads[rank].plus(cost, plan.layout.shard_span(rank).numel)
    return loads


def default_cap_bytes(backend: str, world_size: int) -> int:
    """The bucket size for ``bucket_cap_mb=None``: 16 MiB, or more if a rank's slice would get small.

    A slice under 256 KiB costs more for the message than for its bytes. One rank alone sends none, and has 64 MiB:
    there a bucket only costs what step() does for each.
    """
    if world_size == 1:
        return 64 * MIB
    slice_bytes = {"gloo": 256 * 1024, "nccl": 512 * 1024}.get(backend, 256 * 1024)
    return max(16 * MIB, world_size * slice_bytes)


def plan_buckets(
    params: Sequence[ParamSpec], world_size: int, cap_bytes: int, loads: Sequence[Load] | None = None
) -> list[BucketPlan]:
    """Fills buckets with parameters in reverse registration order, which is about the order of their gradients.

    A bucket holds one dtype, gradients of one dtype and divisor, one rule, and state stored in one form. It is closed
    by the first parameter that would take it over ``cap_bytes``; a parameter larger than the cap has a bucket of its
    own. Inside, large parameters come first. Those that lie whole on one rank have buckets of their own, and are
    dealt so that over all buckets each rank's cost about the same; of a large stack ranks have slices. ``loads``: what
    ranks own of such already.
    Raises ValueError for an impossible cap or world size.
    """
    if cap_bytes < 1:
        raise ValueError(f"a bucket's cap must be at least 1 byte, got {cap_bytes}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    closed: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    filled_bytes: dict[object, int] = {}
    for index in reversed(range(len(params))):
        param = params[index]
        kind = param.kind
        bucket = filling.get(kind)
        if bucket is None or filled_bytes[kind] + param.nbytes > cap_bytes:
            bucket = filling[kind] = []
            filled_bytes[kind] = 0
            closed.append(bucket)
        bucket.append(index)
        filled_bytes[kind] += param.nbytes
    owner_of, slices_of = _deal(params, world_size, cap_bytes, loads)
    plans = []
    for bucket in closed:
        first = params[bucket[0]]
        bucket.sort(key=lambda index: params[index].nbytes < ZERO_COPY_BYTES)
        start_align = max(1, START_ALIGN_BYTES // first.itemsize)
        of_bucket = tuple(owner_of[i] for i in bucket) if bucket[0] in owner_of else None
        numels = tuple(params[i].numel for i in bucket)
        layout = Layout(numels, world_size, start_align, of_bucket, slices_of.get(bucket[0]))
        num_zero_copy = sum(params[i].nbytes >= ZERO_COPY_BYTES for i in bucket)
        if layout.shard_numel * first.itemsize < ZERO_COPY_SLICE_BYTES:
            num_zero_copy = 0
        own = tuple(params[i].cost or 0 for i in bucket) if first.is_whole else ()
        plan = BucketPlan(tuple(bucket), first.dtype, first.itemsize, layout, first.state_form, num_zero_copy, own)
        plans.append(plan)
    return plans


def _deal(
    params: Sequence[ParamSpec], world_size: int, cap_bytes: int, loads: Sequence[Load] | None
) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """The ranks of those that lie whole on one, and how many slices each rank has of those that are divided: as many as
    the others, and what is left goes to the least loaded ranks."""
    items = []  # what lies on one rank: a parameter, by its place, its cost and its elements, or a slice that is left
    loads = [Load()] * world_size if loads is None else list(loads)
    slices = {}
    for index, param in enumerate(params):
        if param.cost is None:
            continue
        if not param.may_be_divided(world_size, cap_bytes):
            items.append((index, param.cost, param.numel))
            continue
        each = index, param.cost // param.slices, param.numel // param.slices
        of_all, left = divmod(param.slices, world_size)
        slices[index] = [of_all] * world_size
        loads = [load.plus(of_all * each[1], of_all * each[2]) for load in loads]
        items += [each] * left
    whom = {}
    costs, numels = [cost for _, cost, _ in items], [numel for *_, numel in items]
    for (index, *_), rank in zip(items, owners(costs, numels, world_size, loads), strict=True):
        if index in slices:
            slices[index][rank] += 1
        else:
            whom[index] = rank
    return whom, {index: tuple(counts) for index, counts in slices.items()}
