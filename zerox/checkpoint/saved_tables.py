"""The state of tables (param groups with sparse=True) in a checkpoint, as whole tensors, and from it; and their values
where they are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zerox.checkpoint.names import MODEL, key_of, keys_in_model
from zerox.checkpoint.saved_param import Read, SavedParam, dtypes_of
from zerox.engine import Engine
from zerox.memory.row_table import RowTable
from zerox.memory.stored import SCALE, Stored
from zerox.plan.form import SAVED_OF_ROWS, num_blocks
from zerox.plan.span import Span
from zerox.ranks.group import CPU
from zerox.rules.rule import MASTER, MASTERS, REMAINDER, STEP
from zerox.sliced_tensor import SlicedTensor
from zerox.state.row_state import VALUES, fill_kept, fill_master, sliced_rows, spread

ROWS_AT_A_TIME = 2**16

Spread = Sequence[tuple[RowTable, str, SlicedTensor]]


def spread_tables(optimizer: Engine) -> Spread:
    """This rank's segments of all tables' state, and of values that are sharded. Collective."""
    return list(spread(optimizer.inside.tables, optimizer.inside.ranks))


def table_entries(found: Spread, names: Mapping[int, str], model: nn.Module) -> dict[str, Tensor]:
    """The same by their names in a checkpoint: values by all those that the model has for them."""
    entries: dict[str, Tensor] = {}
    for table, what, tensor in found:
        keys = [key_of(names[table.member.number], what)] if what != VALUES else keys_in_model(model, table.param)
        entries |= dict.fromkeys(keys if tensor.own.numel() else (), tensor)
    return entries


class SavedTables:
    """What a checkpoint has of an optimizer's tables. ``params``: of each of its parameters, by number."""

    def __init__(self, tables: Sequence[RowTable], params: Mapping[int, SavedParam]) -> None:
        self.each = [(table, params[table.member.number]) for table in tables]

    def known(self) -> Iterator[str]:
        for table, saved in self.each:
            more = [*(spec.key for spec in MASTERS), *(key + SCALE for key in table.state)]
            yield from (saved.key(what) for what in (*table.needed_keys, *more))

    def needed(self) -> Iterator[str]:
        """None of a parameter that was frozen: its state starts now."""
        for table, saved in self.each:
            if saved.was_saved or saved.group is None:
                scales = [key + SCALE for key, kept in table.state.items() if saved.has_scales(kept.spec)]
                yield from (saved.key(what) for what in (*table.needed_keys, *scales))

    def misfits(self) -> Iterator[str]:
        for table, saved in self.each:
            whole = tuple(table.param.shape)
            of_scales = whole[0], num_blocks(table.width)
            expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {STEP.key: ((), (torch.int64,))}
            expected |= dict.fromkeys(table.state, (whole, dtypes_of(SAVED_OF_ROWS)))
            expected |= dict.fromkeys((key + SCALE for key in table.state), (of_scales, (torch.float32,)))
            expected |= {MASTER.key: (whole, (torch.float32,)), REMAINDER.key: (whole, (torch.int16,))}
            lines = [saved.misfit(what, *expected[what], table.param.dtype) for what in expected]
            yield from filter(None, lines)

    def load(self, read: Read) -> list[str]:
        """Each rank reads tables in ranges of rows, and keeps those that it owns, which lie all over them. Returns what
        had to be rounded."""
        rounded: list[str] = []
        for table, saved in self.each:
            if table.own is not None and (key := MODEL + saved.name) in saved.saved:
                self._load_rows(table, {key: table.own}, read)
            if not saved.was_saved:
                table.step.zero_()
                for kept in table.state.values():
                    kept.zero_()
                fill_master(table, {})
                continue
            step = torch.zeros(1, dtype=torch.int64, device=CPU)
            read({saved.key(STEP.key): SlicedTensor((), (), Span(0, 1), step)})
            table.step.fill_(int(step))
            for kept in table.state.values():
                rounded += self._load_kept(table, saved, kept, read)
            shape, masters = table.own_values.shape, [spec.key for spec in MASTERS if saved.has(spec.key)]
            given = {key: torch.empty(shape, dtype=saved.dtype(key), device=CPU) for key in masters}
            self._load_rows(table, {saved.key(key): values for key, values in given.items()}, read)
            rounded += fill_master(table, given)
        return rounded

    def _load_kept(self, table: RowTable, saved: SavedParam, kept: Stored, read: Read) -> list[str]:
        """One state of this rank's rows. Returns what had to be rounded."""
        form = saved.form(kept.spec) or kept.form
        is_same = form == kept.form
        found = kept if is_same else Stored.of_rows(kept.spec, form, len(kept.values), table.width, CPU)
        self._load_rows(table, {saved.key(what): tensor for what, tensor in found.tensors().items()}, read)
        return [] if is_same else fill_kept(kept, found)

    def _load_rows(self, table: RowTable, into: Mapping[str, Tensor], read: Read) -> None:
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
