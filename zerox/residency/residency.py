"""Sharded parameters (ZeRO stage 3): each rank keeps a part, and buckets are whole only while something reads them."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from zerox import _C as C
from zerox import _torch
from zerox.memory.bucket import Bucket, FrozenBucket
from zerox.memory.flat import BufferSlot, Materialize, ShardedBuffer, give_out, in_shared_memory, take_in, values_of
from zerox.memory.row_table import RowTable
from zerox.model_names import in_text
from zerox.options import OptimizerOptions
from zerox.params.params import ParamGather
from zerox.plan.layout import Layout
from zerox.plan.stage import SHARDED
from zerox.ranks.calls import named
from zerox.ranks.dtensors import cut_of, local_of
from zerox.ranks.group import Ranks
from zerox.ranks.neighbours import find_neighbours
from zerox.ranks.process_group import time_of
from zerox.ranks.roll_call import summary_of
from zerox.residency import written_alone
from zerox.residency.new_buckets import NewBuckets, buffer_of, holders_of, in_order
from zerox.sliced_tensor import SlicedTensor

FOR_LATE_RANKS = timedelta(minutes=1)  # where it is seen that they wait themselves
SWITCH = "ZEROX_FAULTS"


@functools.cache
def check_operators() -> None:
    """ImportError if torch lacks an operator that csrc/params meets by name: see csrc/torch_internals.h."""
    if missing := C.missing_operators(C.operator_names()):
        raise _torch.error_of_changed(f"the operator {missing[0]}", "to know what operators read of sharded parameters")


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
        assert ranks.given is not None
        neighbours = self._neighbours()
        all_neighbours = bool(neighbours) and all(neighbours)
        timeout = time_of(ranks.given)
        self.residents = C.Residency(
            group=None if all_neighbours else self._messages(),
            failure_detector=ranks.failure_detector,
            linger=ranks.neighbours.linger,
            processes=neighbours,
            ranks=in_order(ranks),
            num_holders=len(holders_of(ranks)),
            rank=holders_of(ranks).index(ranks.rank),
            timeout=timeout,
            faults=_may_fault(),
        )
        weakref.finalize(self, self.residents.leave_to_params).atexit = False
        if all_neighbours:
            C.wait_until_awaited(manager.backward, min(FOR_LATE_RANKS, timeout / 4))
        written_alone.watch(self, ranks.given)
        self.new = NewBuckets(ranks, self.residents, neighbours, resident_mb)
        # The same objects, which grow with each adoption.
        self.all, self.index_of, self.tables = self.new.all, self.new.index_of, self.new.tables
        self.elsewhere: Sequence[BufferSlot] = ()  # what the last step() found moved
        self.depth = 0  # how many whole() are open
        self.under_way: ShardWrite | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks over which parameters are sharded."""
        return holders_of(self.ranks)

    def _neighbours(self) -> tuple[int, ...]:
        """Also with parameters on an accelerator: others read in the host's memory how far a shard has come."""
        ranks = self.ranks
        if ranks.device.type == "cpu" or ranks.exchange == "messages":
            return ranks.neighbours.processes
        with ranks.failure_told():
            return find_neighbours(ranks.all_gather_text, ranks.rank)

    def _messages(self) -> dist.ProcessGroup | None:
        """In which ranks are asked for their shards: also at their end, if there is such a group."""
        ranks = self.ranks
        if ranks.neighbours.questions is not None:
            return ranks.neighbours.questions.group
        return ranks.data if ranks.backend == "gloo" else ranks.control

    # ---- building

    def make_buffer(self, params: Sequence[Tensor], layout: Layout) -> ShardedBuffer:
        return self.new.make_buffer(params, layout)

    def find_left(self, planned: Sequence[tuple[Sequence[Tensor], Layout]]) -> None:
        """Which of these buckets a deleted optimizer has left, on all ranks. Collective."""
        self.new.find_left(planned)

    def add_buckets(
        self,
        trained: Iterable[Bucket],
        frozen: Iterable[FrozenBucket],
        tables: Sequence[RowTable],
        materialize: Materialize | None = None,
    ) -> Generator[Bucket | FrozenBucket, None, None]:
        return self.new.add(trained, frozen, tables, materialize)

    def check_room(self, added: Sequence[tuple[str, int]]) -> float:
        return self.new.check_room(added)

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
