"""One parameter of an optimizer in full, for calls that all ranks make together for it: where it lies on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Bucket, Member
from zerox.memory.row_table import RowTable
from zerox.memory.state_layout import StateLayout
from zerox.model_names import in_text, name_or_shape
from zerox.plan.layout import Segment
from zerox.ranks.dtensors import part_of
from zerox.ranks.group import Ranks
from zerox.ranks.subgroups import Subgroups

WAY_OUT = "make the same call on all ranks, for the same parameter and with equal values"


@dataclass(frozen=True)
class OneParam:
    """The parameter in ``slot`` of the bucket of this ``index``. ``ranks``: those that have it, of ``everyone``."""

    index: int
    slot: int
    bucket: Bucket
    ranks: Ranks
    everyone: Ranks

    @property
    def member(self) -> Member:
        return self.bucket.members[self.slot]

    @property
    def is_expert(self) -> bool:
        """Whether only some of the optimizer's ranks have it."""
        return self.ranks is not self.everyone

    @property
    def wide(self) -> torch.dtype:
        """Of what users see of it."""
        return torch.float64 if self.bucket.buffer.flat.dtype is torch.float64 else torch.float32

    @cached_property
    def own_row(self) -> int | None:
        """That of its segment on this rank."""
        return next((row for row, own in enumerate(self.bucket.own_segments) if own.slot == self.slot), None)

    @property
    def own(self) -> Segment | None:
        return None if self.own_row is None else self.bucket.own_segments[self.own_row]

    @property
    def own_elements(self) -> slice:
        """Of the shard."""
        return slice(0, 0) if self.own is None else slice(self.own.span.start, self.own.span.stop)

    @property
    def own_numel(self) -> int:
        return self.own_elements.stop - self.own_elements.start

    @property
    def own_start(self) -> int:
        """The place in the parameter of its first element on this rank."""
        return 0 if self.own is None else self.own.param_start

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's elements of a tensor that has the parameter's shape and order in memory: a view."""
        return in_memory_order(whole)[self.own_start : self.own_start + self.own_numel]

    def owners(self, lies: StateLayout | None = None) -> list[tuple[int, Segment]]:
        """The ranks that have a part of it, or of state that ``lies`` by itself, each with that part: at least one,
        also where it has no elements."""
        layout = self.bucket.plan.layout if lies is None else lies.layout
        segments = ((rank, layout.segments(self.ranks.shard_of(rank))) for rank in range(self.ranks.size))
        return [(rank, each) for rank, own in segments for each in own if each.slot == self.slot]

    def empty(self, dtype: torch.dtype, lies: StateLayout | None = None) -> Tensor:
        """For the whole tensor. The parameter itself is not asked for its strides: it may be anywhere by now."""
        of = self.bucket.buffer if lies is None else lies
        shape = of.shapes[self.slot] or ()
        return torch.empty_strided(shape, of.strides[self.slot], dtype=dtype, device=self.bucket.device)

    def all_gather(self, own: Tensor | None, dtype: torch.dtype, what: str, lies: StateLayout | None = None) -> Tensor:
        """The whole tensor on all ranks from each rank's part, 1-D (None on a rank without one). Collective.

        Only what each owner has is sent: a parameter that lies on one rank is not sent as often as there are ranks.
        """
        whole = self.empty(dtype, lies)
        flat = in_memory_order(whole)
        for rank, segment in self.owners(lies):
            part = flat[segment.param_start : segment.param_start + segment.span.numel]
            if rank == self.ranks.rank:
                assert own is not None
                part.copy_(own)
            if part.numel() > 0:
                self.ranks.broadcast(part, f"{what} of parameter '{self.member.name}'", root=rank)
        return whole

    def from_owner(self, number: Tensor, what: str) -> Tensor:
        """A number ``[1]`` as the first owner has it: all owners have the same. Collective."""
        rank, _ = self.owners()[0]
        told = number.clone()
        self.ranks.broadcast(told.view(torch.uint8), f"{what} of parameter '{self.member.name}'", root=rank)
        return told

    def take_value(self, what: str, value: object, lies: StateLayout | None = None) -> Tensor:
        """A user's whole value, float32 or float64, in the parameter's order in memory; of a DTensor its local part.

        ValueError if it does not fit.
        """
        of = self.bucket.buffer if lies is None else lies
        shape = (of.shapes[self.slot] or ()) if self.member.cut is None else self.member.param.shape
        if not isinstance(value, Tensor) or value.shape != shape:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{what} of parameter {self.member.quoted} must be a whole tensor of its shape {tuple(shape)}, got "
                f"{found}"
            )
        if value.dtype.is_complex or value.layout is not torch.strided:
            raise ValueError(
                f"{what} of parameter {self.member.quoted} must be a dense tensor of real numbers, got {value.dtype} "
                f"in the layout {value.layout}"
            )
        dtype = torch.promote_types(value.dtype, self.wide)
        return self.empty(dtype, lies).copy_(part_of(self.member.param, value.detach()))

    def describe_call(self, call: str, given: Mapping[str, object] | None = None) -> str:
        """What ranks compare of a call: equal only if they make it for one parameter with equal values."""
        line = f"{call} of parameter '{self.member.name}', which is number {self.member.number},"
        said = [f"{key} {_describe(value)}" for key, value in (given or {}).items()]
        return f"{line} with {', '.join(said)}" if said else line.removesuffix(",")

    def _name_params(self, line: str) -> str:
        return in_text(line, [(self.member.name, self.member.param)])

    def agree(self, call: str, given: Mapping[str, object] | None = None) -> None:
        """ValueError on all ranks unless all make this call. Collective.

        Where ranks have parameters of their own, those of one parameter agree by themselves.
        """
        line = self.describe_call(call, given)
        if not self.is_expert:
            self.ranks.check_same([line], way_out=WAY_OUT, in_words=self._name_params)
            return
        self.everyone.check_same([f"{call} of a parameter of param group {self.member.group}"], way_out=WAY_OUT)
        with self.everyone.refusals_told():
            self.ranks.check_same([line], way_out=WAY_OUT, in_words=self._name_params)
        self.everyone.check_same([])


def each_param(buckets: Sequence[Bucket], subgroups: Subgroups) -> Iterator[OneParam]:
    for index, bucket in enumerate(buckets):
        for slot, member in enumerate(bucket.members):
            yield OneParam(index, slot, bucket, subgroups.of_group[member.group].ranks, subgroups.ranks)


def one_param(
    buckets: Sequence[Bucket], subgroups: Subgroups, own: Mapping[int, Tensor], param: object, call: str
) -> OneParam:
    """ValueError for what is in no bucket. ``own``: this rank's own parameters, by id, which never are."""
    for one in each_param(buckets, subgroups):
        if one.member.param is param:
            return one
    if isinstance(param, Tensor) and id(param) in own:
        raise ValueError(
            f"{call}: {name_or_shape(param)} is this rank's own parameter. No DistributedDataParallel has it, and one "
            "has others of this optimizer, so nothing averages or shards it. Its gradient is p.grad and its state is "
            "optimizer.state[p], on this rank alone: read and write these"
        )
    what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
    raise ValueError(
        f"{call}: {what} is no parameter that this optimizer trains; pass one of its param groups that requires "
        "gradients (tables, with sparse=True, are not known here)"
    )


def agree_on_param(
    buckets: Sequence[Bucket], subgroups: Subgroups, own: Mapping[int, Tensor], param: object, call: str
) -> OneParam:
    """ValueError on all ranks unless all ask ``call`` of the same one. Collective."""
    with subgroups.ranks.refusals_told():
        one = one_param(buckets, subgroups, own, param, call)
    one.agree(call)
    return one


def agree_on_table(tables: Sequence[RowTable], subgroups: Subgroups, param: object, call: str) -> RowTable | None:
    """The table that ``param`` is, or None. Collective, with agree_on_param() where it is None: ValueError as there."""
    found = next((table for table in tables if table.param is param), None)
    if found is not None:
        line = f"{call} of parameter '{found.member.name}', which is number {found.member.number}"
        subgroups.ranks.check_same([line], way_out=WAY_OUT)
    return found


def in_memory_order(whole: Tensor) -> Tensor:
    """A view of a tensor without gaps."""
    return whole.as_strided((whole.numel(),), (1,))


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() < 2:
        return str(value.flatten().tolist()).strip("[]")
    return f"of digest {C.digest(in_memory_order(value)):016x}"
