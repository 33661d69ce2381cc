"""A bucket as this rank sees it: its parameters in one flat buffer, and the optimizer state of its own shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox._C import SEGMENT_COLUMNS
from zerox.memory.flat import FlatBuffer, dense_strides
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.memory.mask import Mask
from zerox.memory.state_layout import StateLayout, by_itself
from zerox.memory.stored import Stored
from zerox.model_names import quote
from zerox.plan.buckets import BucketPlan
from zerox.plan.cut import Cut
from zerox.plan.form import BLOCK_NUMEL, BOOL
from zerox.plan.layout import Layout, Segment
from zerox.plan.span import Span
from zerox.plan.state_layout import layout_of_state
from zerox.ranks.dtensors import cut_of, cuts_of, is_dtensor, local_of
from zerox.rules.rule import MASK, MASTER, MASTERS, STEP, Rule, StateSpec

CPU = torch.device("cpu")
MOST_NAMES = 8


@dataclass(frozen=True)
class Member:
    """One parameter: its name, the index of its param group, and its number, the position among all that ranks share.

    The number is the same on all ranks and never changes: groups that are added later come behind.
    """

    name: str
    param: Tensor
    group: int
    number: int

    @property
    def local(self) -> Tensor:
        """What lies in a bucket: see Note [Local tensors] in csrc/buckets/bucket.h."""
        found: Tensor = local_of(self.param)
        return found

    @property
    def cut(self) -> Cut | None:
        """Where that lies in the whole parameter, if it is a part of it."""
        return cut_of(self.param)

    @property
    def keeps_blocks(self) -> bool:
        """Whether the local tensor's blocks of 256 elements are blocks of the whole one. The same on all ranks."""
        if not (parts := cuts_of(self.param)):
            return True
        is_by_rows = parts.keys() == {0} and self.param.shape[0] % parts[0] == 0
        local = self.local
        row_major = torch.empty(local.shape, device="meta").stride()
        return is_by_rows and dense_strides(local) == row_major and local.numel() % BLOCK_NUMEL == 0

    @property
    def quoted(self) -> str:
        """For errors: a parameter without a name is looked up in the living models."""
        return quote(self.name, self.param)


def members_of(groups: Sequence[dict[str, Any]], apart: Collection[int] = ()) -> Iterator[Member]:
    """Every parameter of an optimizer's groups once, in registration order, but those that are ``apart``, by id."""
    seen: set[int] = set()
    position = 0
    for index, group in enumerate(groups):
        names = group.get("param_names")
        for place, param in enumerate(group["params"]):
            if id(param) in apart:
                continue
            name = str(names[place]) if names and place < len(names) else f"param {position}"
            if id(param) not in seen:
                seen.add(id(param))
                yield Member(name, param, index, position)
            position += 1


def refuse_dtensors(members: Iterable[Member], call: str) -> None:
    """NotImplementedError where a call knows plain parameters only."""
    for member in members:
        if is_dtensor(member.param):
            raise NotImplementedError(
                f"zerox: parameters that are DTensors, as {member.quoted}, do not go with {call} yet"
            )


def bytes_of(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


class GradPart(NamedTuple):
    """Elements of a shard's gradient that lie together, from its element ``start`` and its segment ``first_row`` on."""

    grad: Tensor
    start: int
    first_row: int
    segments: Tensor  # those inside, counted from ``start``
    mask: Tensor | None = None  # which of its elements count and are updated: bits, as in zerox/memory/mask.py


class Part(NamedTuple):
    """What a bucket keeps for the elements of a :class:`GradPart`, as views: ``steps`` of its ``rows`` (None: all)."""

    param: Tensor
    master: Tensor | None
    state: list[Tensor]
    scales: list[Tensor]
    rows: slice | None
    steps: Tensor


MakeBuffer = Callable[[Sequence[Tensor], Layout], FlatBuffer]


class FrozenBucket:
    """Parameters that are not trained, where they are sharded: ``members`` in the plan's order."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], make_buffer: MakeBuffer) -> None:
        self.plan = plan
        self.members = list(members)
        self.buffer = make_buffer([member.local for member in members], plan.layout)

    def describe(self, index: int) -> str:
        return f"frozen {describe(index, self.members)}"


def named_params(buckets: Iterable[Bucket]) -> list[tuple[str, Tensor]]:
    """Their parameters, as the optimizer calls them."""
    return [(member.name, member.param) for bucket in buckets for member in bucket.members]


def describe(index: int, members: Sequence[Member]) -> str:
    """For errors: "bucket 3 (wte.weight, ...)", as csrc/buckets/bucket.h has it."""
    names = ", ".join(member.name for member in members[:MOST_NAMES])
    more = len(members) - MOST_NAMES
    return f"bucket {index} ({names}{f' and {more} more' if more > 0 else ''})"


def rooms(plans: Sequence[BucketPlan], members: Sequence[Member]) -> Iterator[tuple[str, int]]:
    """Name and bytes of the buckets of these plans."""
    for index, plan in enumerate(plans):
        inside = [members[i] for i in plan.params]
        yield describe(index, inside), plan.nbytes


def segment_table(segments: Sequence[Segment], members: Sequence[Member]) -> Tensor:
    """What kernels know of a shard: int64 ``[n, SEGMENT_COLUMNS]``, on the host, see csrc/math/segment.h."""
    rows = []
    for each in segments:
        member = members[each.slot]
        rows.append([each.span.start, each.span.stop, member.group, member.number, each.param_start])
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, SEGMENT_COLUMNS)


class Bucket:
    """``members`` in the plan's order. ``specs``: the state of each element. State and steps start at zero."""

    def __init__(
        self,
        plan: BucketPlan,
        members: Sequence[Member],
        rank: int,
        rule: Rule,
        specs: Sequence[StateSpec],
        make_buffer: MakeBuffer = FlatBuffer,
    ) -> None:
        self.plan = plan
        self.members = list(members)
        self.buffer = make_buffer([member.local for member in members], plan.layout)
        self.rank = rank
        self.rule = rule
        self.param_shard = self.buffer.shard(rank)

        self.segments = segment_table(self.own_segments, self.members).to(self.device)
        self.steps = torch.zeros(len(self.own_segments), dtype=torch.int64, device=CPU if rule.on_host else self.device)
        self.numbers = {STEP.key: self.steps}  # by key, one for each row
        self.absent: set[tuple[int, str]] = set()  # (row, key) of state that begins with the next update only
        self.state: dict[str, Stored] = {}
        self.mask: Mask | None = None  # of the shard; None: all elements are kept
        for spec in specs:
            self.keep(spec)
        self.keep_numbers()

    @cached_property
    def own_segments(self) -> list[Segment]:
        """Of the parameters, in this rank's shard."""
        return self.plan.layout.segments(self.rank)

    @cached_property
    def own_spans(self) -> dict[int, Span]:
        """Where each slot's elements lie in this rank's shard, for those that have some."""
        return {each.slot: each.span for each in self.own_segments}

    @cached_property
    def grad_dtype(self) -> torch.dtype:
        return grad_dtype_of(self.members[0].param)

    @cached_property
    def groups(self) -> list[int]:
        """The indices of its members' param groups."""
        return sorted({member.group for member in self.members})

    @property
    def device(self) -> torch.device:
        return self.buffer.flat.device

    def param_of(self, row: int) -> Tensor:
        """The values of a row's parameter, 1-D: also of one that lies elsewhere, and comes home with the next call."""
        own = self.own_segments[row]
        if self.buffer.is_at_home(own.slot) or self.buffer.misfit(own.slot, self.members[own.slot].name):
            return self.param_shard[own.span.start : own.span.stop]
        values = self.buffer.in_order(own.slot, self.buffer.params[own.slot].detach())
        return values[own.param_start : own.param_start + own.span.numel]

    def params_now(self) -> Tensor:
        """The shard, with the values of parameters that lie elsewhere."""
        shard = self.param_shard
        for row, own in enumerate(self.own_segments):
            if not self.buffer.is_at_home(own.slot):
                shard = shard.clone() if shard is self.param_shard else shard
                shard[own.span.start : own.span.stop] = self.param_of(row)
        return shard

    def place(self, members: Sequence[Member]) -> None:
        """The same parameters, with the groups and numbers that they have now."""
        self.members[:] = members
        self.segments.copy_(segment_table(self.own_segments, self.members))
        self.__dict__.pop("groups", None)

    def keep(self, spec: StateSpec) -> None:
        """Begins to keep this too, in the order of the rule's specs: all ranks gather state in one order."""
        how = self.rule.kept(spec, self.plan.state_form)
        lies = self._layout_by_itself(spec)
        numel = self.param_shard.numel() if lies is None else lies.layout.shard_span(self.rank).numel
        made = Stored.zeros(spec, how, numel, self.device, lies)
        kept = self.state | {spec.key: made}
        order = [each.key for each in (*self.rule.states, *MASTERS)]
        self.state = {key: kept[key] for key in order if key in kept}

    def _layout_by_itself(self, spec: StateSpec) -> StateLayout | None:
        params = self.buffer.shapes
        shapes = [shape if spec in MASTERS else self.rule.shape_of(spec, shape) for shape in params]
        layout = layout_of_state(self.plan.layout, params, shapes)
        return None if layout is None else by_itself(layout, self.rank, shapes, self.buffer)

    def layout_of(self, stored: Stored) -> StateLayout:
        """Of state of this bucket."""
        if stored.layout is not None:
            return stored.layout
        return StateLayout(self.plan.layout, self.own_segments, self.buffer.shapes, self.buffer.strides)

    def part_of(self, stored: Stored, row: int) -> Stored:
        """What a row has of state of this bucket: a view. ``row``: -1 if this rank has none."""
        span = self.layout_of(stored).segment(row).span
        return stored.part(slice(span.start, span.stop))

    def mask_of(self, start: int, numel: int) -> Tensor | None:
        """Its bits for these elements of the shard."""
        return None if self.mask is None else self.mask.part(start, numel)

    def shown_state(self) -> list[Stored]:
        """The state of elements, with the mask as bools: a copy."""
        mask = [] if self.mask is None else [Stored(MASK, BOOL, self.mask.kept())]
        return [*self.state.values(), *mask]

    def take_mask(self, mask: Mask) -> None:
        """What it does not keep becomes 0 in parameter, master and state."""
        self.mask = mask
        masked = ~mask.kept()
        for values in (self.param_shard, *(stored.values for stored in self.state.values())):
            values.masked_fill_(masked, 0)  # the code 0 is 0, whatever the scale

    def part(self, of: GradPart) -> Part:
        """Views, which hold until keep() is called."""
        elements = slice(of.start, of.start + of.grad.numel())
        rows = slice(of.first_row, of.first_row + len(of.segments))
        kept = {key: stored.part(elements) for key, stored in self.state.items()}
        master = next((kept.pop(spec.key).values for spec in MASTERS if spec.key in kept), None)
        state = [stored.values for stored in kept.values()]
        scales = [stored.scales for stored in kept.values() if stored.scales is not None]
        steps = self.steps[rows]
        has_all = steps.numel() == self.steps.numel()
        return Part(self.param_shard[elements], master, state, scales, None if has_all else rows, steps)

    def absent_state(self) -> set[tuple[int, str]]:
        """(parameter's number, key) of what is ``absent``."""
        return {(self.members[self.own_segments[row].slot].number, key) for row, key in self.absent}

    def keep_numbers(self) -> None:
        """Begins to keep numbers that the rule has got since."""
        for spec in self.rule.numbers:
            if spec.key not in self.numbers:
                device = self.device if spec.on_device else CPU
                made = torch.zeros(self.steps.numel(), dtype=getattr(torch, spec.dtype), device=device)
                self.numbers[spec.key] = made

    @property
    def master(self) -> Stored | None:
        return next((self.state[spec.key] for spec in MASTERS if spec.key in self.state), None)

    def describe(self, index: int) -> str:
        return describe(index, self.members)

    def start(self) -> None:
        """The shard and the master take the parameters' values, once these are the same on all ranks."""
        self.buffer.start()
        if MASTER.key in self.state:
            self.state[MASTER.key].values.copy_(self.param_shard)

    def state_of_own(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter that has elements here, with views of its state."""
        for row, segment in enumerate(self.own_segments):
            yield self.members[segment.slot].param, self.views_of(row)

    def views_of(self, row: int) -> dict[str, Tensor]:
        """A parameter's state.

        A view has the parameter's shape, or the one that its spec makes of it, if this rank owns all of it, else it is
        the 1-D range of its elements in memory order that this rank owns. Keys as in the rule's torch.optim class, and
        "remainder" or "master" if one is kept. 8-bit values are uint8 codes; their scales are beside them under
        "..._scale": float32, one for each block of 256 elements in memory order (zerox/plan/form.py).
        """
        segment = self.own_segments[row]
        state = {key: numbers[row] for key, numbers in self.numbers.items()}
        for key, stored in self.state.items():
            if stored.layout is not None and stored.layout.shapes[segment.slot] is None:
                continue
            own = self.part_of(stored, row)
            state |= own.tensors()
            local = self.buffer.params[segment.slot]
            if stored.layout is not None:
                state[key] = stored.layout.view(segment.slot, own.values)
            elif own.values.numel() == local.numel():
                start = own.values.storage_offset()
                state[key] = own.values.as_strided(local.shape, dense_strides(local), start)
        return state


def start_states(buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]], capturing: bool = False) -> bool:
    """Gives buckets the state that an option of their groups now asks for; returns whether any was missing."""
    rules = {bucket.rule.name: bucket.rule for bucket in buckets}.values()
    late = {rule.name: [rule.late(group) for group in groups] for rule in rules}
    if not any(specs for of_groups in late.values() for specs in of_groups):
        return False
    missing = {
        (index, spec.key): (bucket, spec)
        for index, bucket in enumerate(buckets)
        for group in bucket.groups
        for spec in late[bucket.rule.name][group]
        if spec.key not in bucket.state
    }
    if missing and capturing:  # each replay would set it to zero
        _, spec = next(iter(missing.values()))
        raise RuntimeError(f"{spec.when} was turned on: call step() once before capturing it")
    for bucket, spec in missing.values():
        bucket.keep(spec)
    for bucket in buckets:
        bucket.keep_numbers()
    return bool(missing)
