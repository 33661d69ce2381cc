"""Buckets on their way to the residents: their memory, their first values, and what all ranks tell each other."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Bucket, FrozenBucket, Member
from zerox.memory.flat import Materialize, ShardedBuffer, Unfilled
from zerox.memory.left_bucket import LeftBucket
from zerox.memory.row_table import RowTable
from zerox.memory.table_buffer import TableBuffer
from zerox.model_names import all_quoted
from zerox.plan.layout import Layout
from zerox.plan.resident import resident_limit
from zerox.plan.span import Span
from zerox.ranks.group import Ranks
from zerox.residency.mapped_shards import map_shards
from zerox.residency.takeover import agree, find_left, handing_over


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


class NewBuckets:
    """Makes buckets, and adds them to what a Residency has: ``all``, in the residents' order, and the places there of
    trained buckets, by index, and of tables, by number. ``neighbours``: by rank, as Ranks has them."""

    def __init__(
        self, ranks: Ranks, residents: C.Residency, neighbours: tuple[int, ...], resident_mb: float | None
    ) -> None:
        self.ranks = ranks
        self.residents = residents
        self.neighbours = neighbours
        self.resident_mb = resident_mb
        self.all: list[Resident] = []
        self.index_of: dict[int, int] = {}
        self.tables: dict[int, int] = {}
        self.left: dict[int, LeftBucket] = {}  # to be taken over, by id of their first parameters

    def make_buffer(self, params: Sequence[Tensor], layout: Layout) -> ShardedBuffer:
        if left := self.left.get(id(params[0])):
            return ShardedBuffer(params, layout, self._own_shards(layout), left.room, left)
        made = self.residents.make_room(layout.numel * params[0].dtype.itemsize, self.ranks.device)
        return ShardedBuffer(params, layout, self._own_shards(layout), made)

    def find_left(self, planned: Sequence[tuple[Sequence[Tensor], Layout]]) -> None:
        """Which of these buckets a deleted optimizer has left, on all ranks. Collective."""
        found = [find_left(params, layout, self._own_shards(layout), self.residents) for params, layout in planned]
        agreed = zip(planned, agree(self.ranks, found), strict=True)
        self.left = {id(params[0]): left for (params, _), left in agreed if left}

    def _own_shards(self, layout: Layout) -> Span:
        """On a mesh the shards of all ranks that differ from this one in the replicate axis only: they lie together."""
        together = self.ranks.size // len(holders_of(self.ranks))
        first = self.ranks.shard_of(self.ranks.rank) // together * together
        return Span(layout.shard_starts[first], layout.shard_starts[first + together])

    def add(
        self,
        trained: Iterable[Bucket],
        frozen: Iterable[FrozenBucket],
        tables: Sequence[RowTable],
        materialize: Materialize | None = None,
    ) -> Generator[Bucket | FrozenBucket, None, None]:
        """Adds ``tables`` that are new, and buckets, which have no values yet and fit: see check_room(). Then yields
        each bucket with this rank's values, in which the caller puts those that are the same on all ranks, into the
        shard too; and it may be released when the next one is asked for. Those on meta have been through all of that
        before, by ``materialize``. Collective.

        See Note [A new bucket is filled] in csrc/residency/filling.h.
        """
        buckets: list[Bucket | FrozenBucket] = [*trained, *frozen]
        first = len(self.all)
        made = [*self._named(buckets), *self._named_tables(tables, first + len(buckets))]
        places = self._tell_places(made)
        self.residents.set_limit(self.check_room([]))
        try:
            for index, (each, by_rank) in enumerate(zip(made, places, strict=True), first):
                if isinstance(each.buffer, TableBuffer) or each.buffer.left is not None:
                    each.buffer.share_out(self.residents, index, by_rank)
            if materialize is not None:
                self._materialize(materialize, [buffer_of(bucket) for bucket in buckets], first, places)
            for index, bucket in enumerate(buckets, first):
                buffer = buffer_of(bucket)
                was_filled = buffer.is_shared_out
                if not was_filled:
                    buffer.fill(self.residents, index)
                yield bucket
                if not was_filled:
                    buffer.share_out(self.residents, index, places[index - first])
            self.residents.await_filled()
        except BaseException:  # the caller's, too: then no rank waits for what is not filled here
            self.residents.give_up_filling()
            raise

    def _materialize(
        self,
        materialize: Materialize,
        buffers: Sequence[ShardedBuffer],
        first: int,
        places: Sequence[list[C.ShardPlace]],
    ) -> None:
        """Those on meta, whose numbers begin with ``first``."""
        on_meta = [place for place, buffer in enumerate(buffers) if buffer.is_on_meta]

        def end(index: int) -> None:
            buffer = buffers[on_meta[index]]
            buffer.keep_own()
            buffer.share_out(self.residents, first + on_meta[index], places[on_meta[index]])

        def begin(index: int) -> None:
            self.residents.begin_fill(first + on_meta[index])

        materialize(Unfilled([buffers[place] for place in on_meta], begin, end, self.residents.await_filled))

    def _named(self, buckets: Sequence[Bucket | FrozenBucket]) -> list[Resident]:
        """Those that are trained, then the frozen ones."""
        num_frozen = len(self.all) - len(self.index_of) - len(self.tables)
        made = []
        for place, bucket in enumerate(buckets, len(self.all)):
            if isinstance(bucket, Bucket):
                index = len(self.index_of)
                self.index_of[index] = place
            else:
                index, num_frozen = num_frozen, num_frozen + 1
            made.append(Resident(bucket.describe(index), bucket.members, buffer_of(bucket)))
        return made

    def _named_tables(self, tables: Sequence[RowTable], first: int) -> list[Resident]:
        new = [table for table in tables if table.member.number not in self.tables]
        names = all_quoted([(table.member.name, table.param) for table in new])
        self.tables |= {table.member.number: place for place, table in enumerate(new, first)}
        return [
            Resident(f"table {name}", [table.member], TableBuffer(table, self.residents))
            for name, table in zip(names, new, strict=True)
        ]

    def _tell_places(self, made: Sequence[Resident]) -> list[list[C.ShardPlace]]:
        """Adds these to the residents. Returns where all ranks have the shards of each. Collective."""
        first, holders = len(self.all), holders_of(self.ranks)
        readable = [process * (rank in holders) for rank, process in enumerate(self.neighbours)]
        mapped = map_shards(self.ranks, readable, [each.buffer.own for each in made])
        with handing_over(self.ranks, self.left.values()):
            try:
                for each, of_others in zip(made, mapped, strict=True):
                    each.buffer.add_to(self.residents, each.name, is_served=len(of_others) < len(holders) - 1)
            finally:
                self.residents.watch_added()  # a read of what was taken over fails from here on, and then fetches
        self.left = {}
        self.all += made
        places = [self.residents.place(index) for index in range(first, len(self.all))]
        text = " ".join([secrets.token_hex(8), *(f"{place.shard} {place.stamps}" for place in places)])
        told = [each.split() for each in self.ranks.all_gather_text(text)]
        self.residents.identity = self.residents.identity or " ".join(each[0] for each in told)
        everyone = [[int(number) for number in each[1:]] for each in told]
        return [
            [
                C.ShardPlace(everyone[rank][2 * count], everyone[rank][2 * count + 1], of_others.get(rank))
                for rank in in_order(self.ranks)
            ]
            for count, of_others in enumerate(mapped)
        ]

    def check_room(self, added: Sequence[tuple[str, int]]) -> float:
        whole = [(each.name, each.nbytes) for each in self.all if each.buffer.is_read_whole]
        tables = sum(each.nbytes for each in self.all if not each.buffer.is_read_whole)
        return resident_limit([*whole, *added], self.resident_mb, tables)


def holders_of(ranks: Ranks) -> tuple[int, ...]:
    """The ranks over which parameters are sharded."""
    return ranks.axes[0].members


def in_order(ranks: Ranks) -> list[int]:
    """All ranks, these first."""
    holders = holders_of(ranks)
    return [*holders, *(rank for rank in range(ranks.size) if rank not in holders)]


def buffer_of(bucket: Bucket | FrozenBucket) -> ShardedBuffer:
    assert isinstance(bucket.buffer, ShardedBuffer)
    return bucket.buffer
