"""Sharded parameters (ZeRO stage 3): each rank keeps a part, and buckets are whole only while something reads them."""

from __future__ import annotations

import functools
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from zerox import _C as C
from zerox import _torch
from zerox.memory.bucket import Bucket, FrozenBucket, Member
from zerox.memory.flat import BufferSlot, ShardedBuffer, give_out, in_shared_memory, take_in, values_of
from zerox.memory.left_bucket import LeftBucket
from zerox.memory.row_table import RowTable
from zerox.memory.table_buffer import TableBuffer
from zerox.model_names import all_quoted, in_text
from zerox.options import OptimizerOptions
from zerox.params.params import ParamGather
from zerox.plan.buckets import BucketPlan
from zerox.plan.layout import Layout
from zerox.plan.resident import resident_limit
from zerox.plan.span import Span
from zerox.plan.stage import SHARDED
from zerox.ranks.calls import named
from zerox.ranks.dtensors import cut_of, local_of
from zerox.ranks.group import Ranks
from zerox.ranks.neighbours import find_neighbours
from zerox.ranks.process_group import time_of
from zerox.ranks.roll_call import summary_of
from zerox.residency import written_alone
from zerox.residency.mapped_shards import map_shards
from zerox.residency.takeover import agree, find_left, handing_over
from zerox.sliced_tensor import SlicedTensor

SWITCH = "ZEROX_FAULTS"


@functools.cache
def check_operators() -> None:
    """ImportError if torch lacks an operator that csrc/params meets by name: see csrc/torch_internals.h."""
    if missing := C.missing_operators(C.operator_names()):
        raise _torch.error_of_changed(f"the operator {missing[0]}", "to know what operators read of sharded parameters")


class Resident(NamedTuple):
    """A bucket, trained or frozen, or a table, with its name for errors."""

    name: str
    members: Sequence[Member]
    buffer: ShardedBuffer | TableBuffer

    @property
    def nbytes(self) -> int:
        return self.buffer.flat.nbytes

    def values_told(self) -> Iterator[str]:
        """Each parameter, with a digest of its values."""
        for slot, member in enumerate(self.members):
            digest = C.digest(self.buffer.values(slot))
            yield f"parameter '{member.name}' with values of digest {digest:016x} at the end of whole()"


@dataclass
class ShardWrite:
    """A step(), or another write of shards, that is under way. ``is_writing``: it has come to write them, and it
    ``is_unclear`` which ones. ``not_published``: buckets whose shards on the replicate axis are on their way."""

    is_writing: bool = False
    is_unclear: bool = False
    not_published: list[int] = field(default_factory=list)


class Residency:
    """The face of csrc/residency/residents.h, in the place of ParamGather."""

    hidden = False  # step() leaves nothing on its way
    shards_params = True  # frozen ones and tables too

    def __init__(self, manager: C.BucketManager, ranks: Ranks, resident_mb: float | None) -> None:
        """ValueError if the parameters' memory can't come and go, or no rank could answer for them."""
        if not C.has_address_ranges():
            raise ValueError("stage=3 needs Linux: use stage=2")
        _torch.check_regions()
        check_operators()
        self.manager = manager
        self.ranks = ranks
        self.resident_mb = resident_mb
        assert ranks.given is not None
        self.neighbours = self._neighbours()
        all_neighbours = bool(self.neighbours) and all(self.neighbours)
        self.residents = C.Residency(
            group=None if all_neighbours else self._messages(),
            failure_detector=ranks.failure_detector,
            linger=ranks.neighbours.linger,
            processes=self.neighbours,
            ranks=self.in_order,
            num_holders=len(self.members),
            rank=self.members.index(ranks.rank),
            timeout=time_of(ranks.given),
            faults=_may_fault(),
        )
        weakref.finalize(self, self.residents.leave_to_params).atexit = False
        written_alone.watch(self, ranks.given)
        self.all: list[Resident] = []  # in the residents' order
        self.left: dict[int, LeftBucket] = {}  # to be taken over, by id of their first parameters
        self.index_of: dict[int, int] = {}  # in it, by index of a trained bucket
        self.tables: dict[int, int] = {}  # in it, by number of a table
        self.elsewhere: Sequence[BufferSlot] = ()  # what the last step() found moved
        self.depth = 0  # how many whole() are open
        self.under_way: ShardWrite | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks over which parameters are sharded."""
        return self.ranks.axes[0].members

    @property
    def in_order(self) -> list[int]:
        """All ranks, these first."""
        return [*self.members, *(rank for rank in range(self.ranks.size) if rank not in self.members)]

    def _neighbours(self) -> tuple[int, ...]:
        """Also with parameters on an accelerator: others read in the host's memory how far a shard has come."""
        ranks = self.ranks
        if ranks.device.type == "cpu" or ranks.exchange == "messages":
            return ranks.neighbours.processes
        with ranks.failure_told():
            return find_neighbours(ranks.all_gather_text, ranks.rank)

    # ---- building

    def _messages(self) -> dist.ProcessGroup | None:
        """In which ranks are asked for their shards: also at their end, if there is such a group."""
        ranks = self.ranks
        if ranks.neighbours.questions is not None:
            return ranks.neighbours.questions.group
        return ranks.data if ranks.backend == "gloo" else ranks.control

    def make_buffer(self, params: Sequence[Tensor], layout: Layout) -> ShardedBuffer:
        if left := self.left.get(id(params[0])):
            return ShardedBuffer(params, layout, self._own_shards(layout), left.room, left)
        made = self.residents.make_room(layout.numel * params[0].dtype.itemsize, params[0].device)
        return ShardedBuffer(params, layout, self._own_shards(layout), made)

    def find_left(self, planned: Sequence[tuple[Sequence[Tensor], Layout]]) -> None:
        """Which of these buckets a deleted optimizer has left, on all ranks. Collective."""
        found = [find_left(params, layout, self._own_shards(layout), self.residents) for params, layout in planned]
        agreed = zip(planned, agree(self.ranks, found), strict=True)
        self.left = {id(params[0]): left for (params, _), left in agreed if left}

    def _own_shards(self, layout: Layout) -> Span:
        """On a mesh the shards of all ranks that differ from this one in the replicate axis only: they lie together."""
        together = self.ranks.size // len(self.members)
        first = self.ranks.shard_of(self.ranks.rank) // together * together
        return Span(layout.shard_span(first).start, layout.shard_span(first + together - 1).stop)

    def take_frozen(
        self, members: Sequence[Member], planned: Sequence[tuple[BucketPlan, Sequence[Member]]]
    ) -> list[FrozenBucket]:
        made: list[FrozenBucket] = []
        for plan, inside in planned:
            bucket = FrozenBucket(plan, inside, self.make_buffer)
            if bucket.buffer.left is None:
                self.ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(len(made))}")
            made.append(bucket)
        return made

    def add_buckets(
        self, trained: Sequence[tuple[int, Bucket]], frozen: Sequence[FrozenBucket], tables: Sequence[RowTable]
    ) -> None:
        """New ones, which have their values and fit: see check_room(). Of ``tables`` those that are new. Collective."""
        first, num_frozen = len(self.all), len(self.all) - len(self.index_of) - len(self.tables)
        self.index_of |= {index: first + count for count, (index, _) in enumerate(trained)}
        added: list[tuple[int, Bucket | FrozenBucket]] = [*trained, *enumerate(frozen, num_frozen)]
        made = [Resident(bucket.describe(index), bucket.members, buffer_of(bucket)) for index, bucket in added]
        new = [table for table in tables if table.member.number not in self.tables]
        names = all_quoted([(table.member.name, table.param) for table in new])
        self.tables |= {table.member.number: first + len(made) + count for count, table in enumerate(new)}
        made += [
            Resident(f"table {name}", [table.member], TableBuffer(table, self.residents))
            for name, table in zip(names, new, strict=True)
        ]
        readable = [process * (rank in self.members) for rank, process in enumerate(self.neighbours)]
        mapped = map_shards(self.ranks, readable, [each.buffer.own for each in made])
        with handing_over(self.ranks, self.left.values()):
            try:
                for each, of_others in zip(made, mapped, strict=True):
                    each.buffer.add_to(self.residents, each.name, is_served=len(of_others) < len(self.members) - 1)
            finally:
                self.residents.watch_added()  # a read of what was taken over fails from here on, and then fetches
        self.left = {}
        self.all += made
        places = [self.residents.place(index) for index in range(first, len(self.all))]
        text = " ".join([secrets.token_hex(8), *(f"{place.shard} {place.stamps}" for place in places)])
        told = [each.split() for each in self.ranks.all_gather_text(text)]
        self.residents.identity = self.residents.identity or " ".join(each[0] for each in told)
        everyone = [[int(number) for number in each[1:]] for each in told]
        self.residents.set_limit(self.check_room([]))
        for count, of_others in enumerate(mapped):
            by_rank = [
                C.ShardPlace(everyone[rank][2 * count], everyone[rank][2 * count + 1], of_others.get(rank))
                for rank in self.in_order
            ]
            self.residents.set_places(first + count, by_rank)

    # ---- step()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the part of step() in which ranks synchronize and write their shards."""
        self._keep_written_so_far()
        written_alone.take_back(self)
        self.residents.begin_update()
        self.under_way = write = ShardWrite()
        try:
            yield
            self._publish_rest(write)
        except BaseException:
            write.is_unclear = True
            raise
        finally:
            self.under_way = None
            self.residents.end_update(write.is_writing, write.is_unclear)
        if self.depth:
            self.residents.refresh_whole()

    def start(self, index: int, background: bool = False) -> None:
        """The shard of a bucket has been written."""
        assert self.under_way is not None
        self.under_way.is_writing = True
        if not self.ranks.on_mesh:
            self.residents.publish(self.index_of[index])
            return
        self.manager.params.start_of(index, self.all[self.index_of[index]].buffer.own)
        self.under_way.not_published.append(index)

    def publish_tables(self, written: Iterable[tuple[RowTable, Tensor]]) -> None:
        assert self.under_way is not None
        for table, places in written:
            self.under_way.is_writing = True
            self.residents.publish(self.tables[table.member.number], places)

    def _publish_rest(self, write: ShardWrite) -> None:
        """What came along the replicate axis. Afterwards no rank reads this one's shards there."""
        if write.not_published:
            self.manager.params.finish()
        for index in write.not_published:
            self.residents.publish(self.index_of[index])

    def mark_written(self) -> None:
        assert self.under_way is not None
        self.under_way.is_writing = self.under_way.is_unclear = True

    def segment_of(self, param: Tensor) -> SlicedTensor | None:
        """Of a parameter that lies in its bucket, the elements that this rank keeps: a view of them."""
        local = local_of(param)
        for _, _, buffer in self.all:
            for slot, each in enumerate(buffer.params):
                if each is local and buffer.is_at_home(slot):
                    shape, strides = buffer.shapes[slot], buffer.strides[slot]
                    own = buffer.own_span(slot), buffer.own_values(slot)
                    return SlicedTensor(shape, strides, *own, cut_of(param))
        return None

    def end_step(self, hidden: bool) -> None:
        pass

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all parameters are whole and in place. Collective at its end, if some were written on any rank."""
        if not self.residents.has_shards:
            yield
            return
        self.residents.enter_whole()
        self.depth += 1
        try:
            if failure := self.failure():
                raise RuntimeError(failure)
            try:
                yield
            except BaseException as error:
                self._take_back(error)
                raise
            if self.depth == 1:
                self._keep_written()
        finally:
            self.depth -= 1
            self.residents.leave_whole()

    def unshard(self) -> None:
        """Makes all whole for good, and lets the shards go. Collective."""
        if not self.residents.has_shards:
            return
        written_alone.come(self.ranks.group_if_any)
        with self.ranks.refusals_told():
            if self.depth:
                raise RuntimeError("unshard() was called inside optimizer.whole(): call it afterwards")
            self.residents.enter_whole()
        try:
            with self.ranks.refusals_told():
                if failure := self.failure() or written_alone.take_refusal(self):
                    raise RuntimeError(failure)
            self.ranks.check_same([])
        except BaseException:
            self.residents.leave_whole()
            raise
        for each in self.all:
            each.buffer.let_shard_go()
        self.residents.let_shards_go()

    def prepare_checkpoint(self) -> None:
        self._keep_written_so_far()
        for _, _, buffer in self.all:
            for slot, param in enumerate(buffer.params):
                if not buffer.is_at_home(slot) and any(each.buffer.room.has(C.address_of(param)) for each in self.all):
                    param.data = param.detach().clone()  # it lies in another one's home, where nothing may be written

    def write(self, index: int, bucket: Bucket, slot: int, value: Tensor) -> None:
        """As step(): each rank its part of the shard, once no rank reads."""
        buffer = buffer_of(bucket)
        with self.updating():
            self.ranks.barrier("a parameter is set on all ranks, whose shards none may read meanwhile")
            buffer.put(slot, value)
            self.start(index)
        param = buffer.params[slot]
        if not buffer.is_at_home(slot) and not in_shared_memory(param):  # the value elsewhere is older
            param.data = buffer.own_home(slot)
        give_out([(buffer, slot)])

    def _keep_written_so_far(self) -> None:
        if self.depth:
            self._keep_written()

    def check_room(self, added: Sequence[tuple[str, int]]) -> float:
        whole = [(each.name, each.nbytes) for each in self.all if each.buffer.is_read_whole]
        tables = sum(each.nbytes for each in self.all if not each.buffer.is_read_whole)
        return resident_limit([*whole, *added], self.resident_mb, tables)

    @named("the end of optimizer.whole()")
    def _keep_written(self) -> None:
        written = self.residents.written_inside()
        if not written:
            return
        written_alone.come(self.ranks.group_if_any)
        try:
            known = [(member.name, member.param) for each in self.all for member in each.members]
            lines = [line for index in written for line in self.all[index].values_told()]
            self.ranks.check_same(lines, in_words=lambda line: in_text(line, known))
        except BaseException:
            self.residents.drop_written(written)
            raise
        self.residents.keep_written(written)
        self.ranks.barrier("all have taken over what was written inside optimizer.whole()")

    def _take_back(self, error: BaseException) -> None:
        """What was written is taken back, on all ranks that wrote: they wait for this one's answer."""
        if written := self.residents.written_inside():
            written_alone.come(self.ranks.group_if_any)  # as those that raise nothing
            self.residents.drop_written(written)
            if self.depth > 1:
                self.residents.refresh_whole()
            with suppress(RuntimeError, ValueError):  # this rank raises its own, first error
                self.ranks.check_same([], f"{summary_of(error)} inside optimizer.whole()")

    def find_elsewhere(self, slots: Sequence[BufferSlot]) -> list[Tensor]:
        """In step() only: until then others read the shards. And before ranks synchronize: one's values may lie in
        another's home, of which another rank then writes its shard."""
        return values_of(slots) if self.under_way else []

    def take_in(self, slots: Sequence[BufferSlot], values: Sequence[Tensor]) -> None:
        if self.under_way:
            take_in(slots, values)

    def failure(self, forget: bool = True) -> str:
        if not self.residents.has_shards:
            return ""
        return self.residents.take_failure() if forget else self.residents.failure

    def wait_for(self, buckets: Sequence[int]) -> None:
        pass

    def wait(self) -> None:
        pass


def _may_fault() -> bool:
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be '0' or '1', got '{value}'")
    return value == "1"


def make_gather(manager: C.BucketManager, ranks: Ranks, options: OptimizerOptions) -> ParamGather | Residency:
    if options.stage_plan.params is SHARDED and ranks.size > 1:
        return Residency(manager, ranks, options.resident_mb)
    return ParamGather(manager, ranks)


def buffer_of(bucket: Bucket | FrozenBucket) -> ShardedBuffer:
    assert isinstance(bucket.buffer, ShardedBuffer)
    return bucket.buffer
