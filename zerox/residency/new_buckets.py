"""Buckets on their way to the residents: their memory, their first values, and what all ranks tell each other."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Bucket, FrozenBucket, Member
from zerox.memory.flat import ShardedBuffer
from zerox.memory.left_bucket import LeftBucket
from zerox.memory.row_table import RowTable
from zerox.memory.table_buffer import TableBuffer
from zerox.model_names import all_quoted
from zerox.plan.buckets import BucketPlan
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
        made = self.residents.make_room(layout.numel * params[0].dtype.itemsize, params[0].device)
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
        return Span(layout.shard_span(first).start, layout.shard_span(first + together - 1).stop)

    def take_frozen(self, planned: Sequence[tuple[BucketPlan, Sequence[Member]]]) -> list[FrozenBucket]:
        made: list[FrozenBucket] = []
        for plan, inside in planned:
            bucket = FrozenBucket(plan, inside, self.make_buffer)
            if bucket.buffer.left is None:
                self.ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(len(made))}")
            made.append(bucket)
        return made

    def add(
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
        holders = holders_of(self.ranks)
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
        self.residents.set_limit(self.check_room([]))
        for count, of_others in enumerate(mapped):
            by_rank = [
                C.ShardPlace(everyone[rank][2 * count], everyone[rank][2 * count + 1], of_others.get(rank))
                for rank in in_order(self.ranks)
            ]
            self.residents.set_places(first + count, by_rank)

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
