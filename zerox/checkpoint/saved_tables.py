"""The state of tables (param groups with sparse=True) in a checkpoint, as whole tensors, and from it; and their values
where they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerox.checkpoint.names import MODEL, OPTIMIZER, keys_in_model
from zerox.engine import Engine
from zerox.memory.row_table import RowTable
from zerox.plan.span import Span
from zerox.ranks.group import CPU
from zerox.rules.rule import MASTER, MASTERS, REMAINDER, STEP
from zerox.sliced_tensor import SlicedTensor
from zerox.state.row_state import VALUES, fill_master, sliced_rows, spread

ROWS_AT_A_TIME = 2**16

Spread = Sequence[tuple[RowTable, str, SlicedTensor]]


def spread_tables(optimizer: Engine) -> Spread:
    """This rank's segments of all tables' state, and of values that are sharded. Collective."""
    return list(spread(optimizer.inside.tables, optimizer.inside.ranks))


def table_entries(found: Spread, names: Mapping[int, str], model: nn.Module) -> dict[str, Tensor]:
    """The same by their names in a checkpoint: values by all those that the model has for them."""
    entries: dict[str, Tensor] = {}
    for table, what, tensor in found:
        keys = [_key(table, what, names)] if what != VALUES else keys_in_model(model, table.param)
        entries |= dict.fromkeys(keys if tensor.own.numel() else (), tensor)
    return entries


def _key(table: RowTable, what: str, names: Mapping[int, str]) -> str:
    return f"{OPTIMIZER}{names[table.member.number]}.{what}"


class SavedTables:
    """What a checkpoint has of an optimizer's tables. ``in_groups``: names of all parameters that it was saved of."""

    def __init__(
        self,
        tables: Sequence[RowTable],
        names: Mapping[int, str],
        saved: Mapping[str, TensorStorageMetadata],
        in_groups: Collection[str],
    ) -> None:
        self.tables = tables
        self.names = names
        self.saved = saved
        self.in_groups = in_groups

    def known(self) -> Iterator[str]:
        for table in self.tables:
            masters = [spec.key for spec in MASTERS]
            yield from (_key(table, what, self.names) for what in (*table.needed_keys, *masters))

    def needed(self) -> Iterator[str]:
        """None of a parameter that was frozen: its state starts now."""
        for table in self.tables:
            if self._was_saved(table) or self.names[table.member.number] not in self.in_groups:
                yield from (_key(table, what, self.names) for what in table.needed_keys)

    def misfits(self) -> Iterator[str]:
        for table in self.tables:
            whole = tuple(table.param.shape)
            expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {STEP.key: ((), torch.int64)}
            expected |= dict.fromkeys((*table.state, MASTER.key), (whole, torch.float32))
            expected[REMAINDER.key] = whole, torch.int16
            for what, (shape, dtype) in expected.items():
                then = self.saved.get(key := _key(table, what, self.names))
                if then is not None and tuple(then.size) != shape:
                    yield f"{key} was saved as {list(then.size)}, and is {list(shape)}"
                elif then is not None and then.properties.dtype is not dtype:
                    yield f"{key} was saved as {then.properties.dtype}, and can be {dtype}"
                elif then is not None and what == REMAINDER.key and table.param.dtype is not torch.bfloat16:
                    yield f"{key} is for a torch.bfloat16 parameter, and the parameter is {table.param.dtype}"

    def load(self, read: Callable[[dict[str, Any]], None]) -> list[str]:
        """Each rank reads tables in ranges of rows, and keeps those that it owns, which lie all over them. Returns what
        had to be rounded."""
        rounded: list[str] = []
        for table in self.tables:
            if table.own is not None and (key := MODEL + self.names[table.member.number]) in self.saved:
                self._load_rows(table, {key: table.own}, read)
            if not self._was_saved(table):
                table.step.zero_()
                for values in table.state.values():
                    values.zero_()
                fill_master(table, {})
                continue
            step = torch.zeros(1, dtype=torch.int64, device=CPU)
            read({_key(table, STEP.key, self.names): SlicedTensor((), (), Span(0, 1), step)})
            table.step.fill_(int(step))
            self._load_rows(table, {_key(table, key, self.names): kept for key, kept in table.state.items()}, read)
            masters = {spec.key: self.saved.get(_key(table, spec.key, self.names)) for spec in MASTERS}
            given = {
                key: torch.empty(table.own_values.shape, dtype=then.properties.dtype, device=CPU)
                for key, then in masters.items()
                if then is not None
            }
            self._load_rows(table, {_key(table, key, self.names): values for key, values in given.items()}, read)
            rounded += fill_master(table, given)
        return rounded

    def _load_rows(self, table: RowTable, into: Mapping[str, Tensor], read: Callable[[dict[str, Any]], None]) -> None:
        """``into``: what this rank keeps of its own rows, by its name in the checkpoint."""
        num_rows = int(table.param.shape[0])
        for start in range(0, num_rows, ROWS_AT_A_TIME):
            rows = Span(start, min(start + ROWS_AT_A_TIME, num_rows))
            numel = rows.numel * table.width
            found = {key: torch.empty(numel, dtype=kept.dtype, device=CPU) for key, kept in into.items()}
            read({key: sliced_rows(table, rows, values) for key, values in found.items()})
            first, last = torch.searchsorted(table.own_rows, torch.tensor([rows.start, rows.stop], device=CPU)).tolist()
            own = table.own_rows[first:last] - rows.start
            for key, values in found.items():
                into[key][first:last] = values.view(-1, table.width)[own]

    def _was_saved(self, table: RowTable) -> bool:
        return _key(table, STEP.key, self.names) in self.saved
