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
from zerox.memory.stored import SCALE, Stored
from zerox.plan.form import num_blocks
from zerox.plan.span import Span
from zerox.ranks.group import CPU
from zerox.rules.rule import MASTER, MASTERS, REMAINDER, STEP
from zerox.sliced_tensor import SlicedTensor
from zerox.state.row_state import VALUES, fill_kept, fill_master, sliced_rows, spread

ROWS_AT_A_TIME = 2**16
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)

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
            more = [*(spec.key for spec in MASTERS), *(key + SCALE for key in table.state)]
            yield from (_key(table, what, self.names) for what in (*table.needed_keys, *more))

    def needed(self) -> Iterator[str]:
        """None of a parameter that was frozen: its state starts now."""
        for table in self.tables:
            if self._was_saved(table) or self.names[table.member.number] not in self.in_groups:
                scales = [key + SCALE for key in table.state if self._dtype_of(table, key) is torch.uint8]
                yield from (_key(table, what, self.names) for what in (*table.needed_keys, *scales))

    def misfits(self) -> Iterator[str]:
        for table in self.tables:
            whole = tuple(table.param.shape)
            of_scales = whole[0], num_blocks(table.width)
            expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {STEP.key: ((), (torch.int64,))}
            expected |= dict.fromkeys(table.state, (whole, STATE_DTYPES))
            expected |= dict.fromkeys((key + SCALE for key in table.state), (of_scales, (torch.float32,)))
            expected |= {MASTER.key: (whole, (torch.float32,)), REMAINDER.key: (whole, (torch.int16,))}
            for what, (shape, dtypes) in expected.items():
                then = self.saved.get(key := _key(table, what, self.names))
                if then is not None and tuple(then.size) != shape:
                    yield f"{key} was saved as {list(then.size)}, and is {list(shape)}"
                elif then is not None and then.properties.dtype not in dtypes:
                    yield f"{key} was saved as {then.properties.dtype}, and can be {' or '.join(map(str, dtypes))}"
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
                for kept in table.state.values():
                    kept.zero_()
                fill_master(table, {})
                continue
            step = torch.zeros(1, dtype=torch.int64, device=CPU)
            read({_key(table, STEP.key, self.names): SlicedTensor((), (), Span(0, 1), step)})
            table.step.fill_(int(step))
            for kept in table.state.values():
                rounded += self._load_kept(table, kept, read)
            masters = {spec.key: self.saved.get(_key(table, spec.key, self.names)) for spec in MASTERS}
            given = {
                key: torch.empty(table.own_values.shape, dtype=then.properties.dtype, device=CPU)
                for key, then in masters.items()
                if then is not None
            }
            self._load_rows(table, {_key(table, key, self.names): values for key, values in given.items()}, read)
            rounded += fill_master(table, given)
        return rounded

    def _load_kept(self, table: RowTable, kept: Stored, read: Callable[[dict[str, Any]], None]) -> list[str]:
        """One state of this rank's rows. Returns what had to be rounded."""
        dtype = self._dtype_of(table, kept.spec.key) or kept.values.dtype
        is_same = dtype is kept.values.dtype
        found = kept if is_same else Stored.of_rows(kept.spec, dtype, len(kept.values), table.width, CPU)
        into = {_key(table, what, self.names): tensor for what, tensor in found.tensors().items()}
        self._load_rows(table, into, read)
        return [] if is_same else fill_kept(kept, found)

    def _load_rows(self, table: RowTable, into: Mapping[str, Tensor], read: Callable[[dict[str, Any]], None]) -> None:
        """``into``: what this rank keeps of its own rows, by its name in the checkpoint."""
        num_rows = int(table.param.shape[0])
        for start in range(0, num_rows, ROWS_AT_A_TIME):
            rows = Span(start, min(start + ROWS_AT_A_TIME, num_rows))
            found = {
                key: torch.empty(rows.numel, kept.shape[1], dtype=kept.dtype, device=CPU) for key, kept in into.items()
            }
            read({key: sliced_rows(table, values.shape[1], rows, values.view(-1)) for key, values in found.items()})
            first, last = torch.searchsorted(table.own_rows, torch.tensor([rows.start, rows.stop], device=CPU)).tolist()
            own = table.own_rows[first:last] - rows.start
            for key, values in found.items():
                into[key][first:last] = values[own]

    def _dtype_of(self, table: RowTable, what: str) -> torch.dtype | None:
        then = self.saved.get(_key(table, what, self.names))
        return None if then is None else then.properties.dtype

    def _was_saved(self, table: RowTable) -> bool:
        return _key(table, STEP.key, self.names) in self.saved
