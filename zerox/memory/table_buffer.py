"""The memory of a table whose rows are sharded (ZeRO stage 3): a ShardedBuffer's kin."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zerox import _C as C
from zerox.memory.flat import dense_strides
from zerox.memory.row_table import RowTable
from zerox.plan.span import Span


class TableBuffer:
    """The whole table, whose rows come and go (csrc/residency/table_rows.h), and ``own``: what this rank
    keeps of it, its rows by place."""

    def __init__(self, table: RowTable, residents: C.Residency) -> None:
        assert table.own is not None
        param = table.param
        self.table = table
        self.is_read_whole = table.is_read_whole
        self.own = table.own
        self.params = [param]
        self.shapes = [param.shape]
        self.strides = [dense_strides(param)]
        self.room = residents.make_table_room(param.nbytes, param.device)
        self.flat = self.room.tensor(param.dtype)
        self.home = self.flat.view(param.shape)

    def is_at_home(self, slot: int) -> bool:
        return self.table.is_at_home

    def values(self, slot: int) -> Tensor:
        """All of them, side by side."""
        return self.flat

    def own_span(self, slot: int) -> Span:
        """None: no rank's rows lie together. zerox/state/row_state.py has them moved to where they do."""
        return Span(0, 0)

    def own_values(self, slot: int) -> Tensor:
        return self.own.view(-1)[:0]

    def let_shard_go(self) -> None:
        """All is whole, for good. The optimizer's other parts go on with the rows."""

    def add_to(self, residents: C.Residency, name: str, is_served: bool) -> None:
        """``is_served``: whether a rank reads the rows in the host's memory."""
        table = self.table
        residents.add_table(name, self.room, self.own, is_served, table.owners.num_rows, table.owners.of_block)

    def share_out(self, residents: C.Residency, index: int, by_rank: Sequence[C.ShardPlace]) -> None:
        """Other ranks read its rows. The table itself has no values from now on but those that are fetched."""
        residents.end_fill(index, by_rank)
        self.params[0].data = self.room.with_own_storage(self.home)
        self.table.home = self.flat
