"""The state of tables in state_dict() and out of it: own rows, whole tensors, and segments for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from zerox.memory.forms import convert_
from zerox.memory.row_table import RowTable
from zerox.memory.stored import SCALE, Stored, form_of
from zerox.plan.form import num_blocks
from zerox.plan.span import Span
from zerox.ranks.group import CPU, Ranks
from zerox.rules.rule import MASTERS, STEP
from zerox.sliced_tensor import SlicedTensor, refuse_pickling
from zerox.state.fill import as_master, rounding_of
from zerox.state.sliced_state import OF_ONE_RANK

VALUES = "values"  # what a table keeps that is no state
ROWS_A_PIECE = 2**14  # that are converted at a time
ROWS_OF = "rows_of"  # beside a rank's own rows: (rank, number of ranks), and nothing else loads them


class RowsOf(tuple[int, ...]):
    """Beside a rank's share, which is not to be pickled by mistake."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> RowsOf:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        refuse_pickling()
        return self._reduced()

    def _reduced(self) -> Any:
        return _rows_of, (*self,)


def _rows_of(rank: int, size: int) -> RowsOf:
    return RowsOf((rank, size))


torch.serialization.add_safe_globals([_rows_of])  # torch.load(weights_only=True)
ForkingPickler.register(RowsOf, RowsOf._reduced)  # between processes of one machine nothing is lost


def own_state(table: RowTable, ranks: Ranks) -> dict[str, Any]:
    """For ``optimizer.state``: views. On one rank these are the whole tensors, as torch.optim.SparseAdam has them."""
    found: dict[str, Any] = {STEP.key: table.step, **table.kept}
    return found if ranks.size == 1 else {**found, ROWS_OF: RowsOf((ranks.rank, ranks.size))}


def whole_state(table: RowTable, ranks: Ranks, to: int | None) -> dict[str, Any]:
    """With the keys of its torch.optim class, on rank ``to`` (None: on all); elsewhere nothing. Collective."""
    most = max(table.owners.rows_of(rank).numel() for rank in range(ranks.size))
    found: dict[str, Any] = {}
    for key, values in table.in_full():
        padded = torch.zeros(most, table.width, dtype=torch.float32, device=CPU)
        padded[: table.own_rows.numel()] = values
        whole = torch.zeros(table.param.shape, dtype=torch.float32, device=CPU)
        for rank, part in enumerate(ranks.gather(padded.reshape(-1), to)):
            rows = table.owners.rows_of(rank)
            whole[rows] = part.view(most, table.width)[: rows.numel()]
        if to in (None, ranks.rank):
            found[key] = whole
    return {STEP.key: table.step.float(), **found} if to in (None, ranks.rank) else {}


def check_rows_given(tables: Sequence[RowTable], ranks: Ranks, given: Mapping[Any, Any]) -> None:
    """ValueError naming the first table whose state does not fit this rank."""
    for table in tables:
        if (state := _check_given(table, given)) is None:
            continue
        known = f"state of parameter {table.member.quoted}, in a param group with sparse=True,"
        needed = table.needed_keys if table.rule.keeps_step else table.state
        if missing := [key for key in needed if key not in state]:
            raise ValueError(f"{known} has no {missing[0]}")
        if ROWS_OF in state and tuple(state[ROWS_OF]) != (ranks.rank, ranks.size):
            raise ValueError(
                f"{known} is of rank {state[ROWS_OF][0]} of {state[ROWS_OF][1]}, and this is rank {ranks.rank} of "
                f"{ranks.size}. {OF_ONE_RANK}"
            )
        num_rows = table.own_rows.numel() if ROWS_OF in state else table.param.shape[0]
        widths = dict.fromkeys((*table.state, *(spec.key for spec in MASTERS if spec.key in state)), table.width)
        coded = [key for key, own in table.state.items() if form_of(own.spec, state[key].dtype).scaled]
        widths |= dict.fromkeys((key + SCALE for key in coded), num_blocks(table.width))
        for key, width in widths.items():
            if key not in state:
                raise ValueError(f"{known} has no {key} beside its codes of 8 bits")
            if isinstance(state[key], SlicedTensor):
                raise ValueError(f"{known} is a slice of a dense parameter's: zerox.load() takes it, or a whole tensor")
            if tuple(state[key].shape) != (num_rows, width):
                found = tuple(state[key].shape)
                raise ValueError(f"{known} has {key} of shape {found} instead of {(num_rows, width)}")


def fill_rows(tables: Sequence[RowTable], given: Mapping[Any, Any]) -> list[str]:
    """Copies values in place. State that isn't given starts anew, as in torch. Returns what had to be rounded."""
    rounded: dict[str, None] = {}
    for table in tables:
        state = _check_given(table, given)
        table.step.fill_(0 if state is None else int(state.get(STEP.key, 1)))
        for key, kept in table.state.items():
            if state is None:
                kept.zero_()
                continue
            scales = _own_rows(table, state, key + SCALE) if key + SCALE in state else None
            rounded |= dict.fromkeys(fill_kept(kept, Stored.given(kept.spec, _own_rows(table, state, key), scales)))
        masters = [spec.key for spec in MASTERS if state is not None and spec.key in state]
        rounded |= dict.fromkeys(fill_master(table, {key: _own_rows(table, state or {}, key) for key in masters}))
    return list(rounded)


def fill_kept(kept: Stored, given: Stored) -> list[str]:
    """Copies the same rows of a state in any form. Returns what had to be rounded."""
    device, rounds = kept.values.device, False
    for rows in (slice(start, start + ROWS_A_PIECE) for start in range(0, len(kept.values), ROWS_A_PIECE)):
        rounds |= convert_(kept.rows(rows), given.rows(rows).to(device))
    return [rounding_of(kept)] if rounds else []


def fill_master(table: RowTable, given: Mapping[str, Tensor]) -> list[str]:
    """``given``: what there is of this rank's own rows in MASTERS, by key; if nothing, the table's values are the exact
    ones. They must be there already. Returns what had to be rounded."""
    if table.master is not None:
        own = {key: values.to(table.param.device) for key, values in given.items()}
        table.master.values.copy_(as_master(table.master.spec, table.own_values, own))
    return ["masters to the parameters' dtype"] if table.master is None and given else []


def _own_rows(table: RowTable, state: Mapping[str, Any], key: str) -> Tensor:
    found: Tensor = state[key] if ROWS_OF in state else state[key][table.own_rows]
    return found


def _check_given(table: RowTable, given: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    found = given[table.param].state if table.param in given else None
    return found or None


# ---- segments, for checkpoints: contiguous rows, of whichever tensor is saved


def spread(tables: Sequence[RowTable], ranks: Ranks) -> Iterator[tuple[RowTable, str, SlicedTensor]]:
    """Each table's state as it is saved: this rank's segment of whole tensors, by key. Of one that is sharded also its
    values, as VALUES. Collective.

    Owners' rows lie all over the table, and files want few pieces: rows go to the rank whose segment they are in.
    """
    for table in tables:
        segment = segment_rows(table, ranks.rank, ranks.size)
        has_step = Span(0, 1 if ranks.rank == 0 else 0)
        yield table, STEP.key, SlicedTensor((), (), has_step, table.step.reshape(1)[: has_step.numel].clone())
        kept = {VALUES: table.own} if table.own is not None else {}
        for key, values in (kept | table.kept).items():
            moved = _move_rows(table, values.cpu(), ranks) if ranks.size > 1 else values
            yield table, key, sliced_rows(table, values.shape[1], segment, moved.reshape(-1))


def segment_rows(table: RowTable, rank: int, size: int) -> Span:
    """The rows that a rank saves."""
    each = -(-table.param.shape[0] // size)
    return Span(min(rank * each, table.param.shape[0]), min((rank + 1) * each, table.param.shape[0]))


def sliced_rows(table: RowTable, width: int, rows: Span, values: Tensor) -> SlicedTensor:
    """``values``, 1-D, are those of these rows, ``width`` of each."""
    span = Span(rows.start * width, rows.stop * width)
    return SlicedTensor((table.param.shape[0], width), (width, 1), span, values)


def _move_rows(table: RowTable, values: Tensor, ranks: Ranks) -> Tensor:
    """From owners to those in whose segment rows are."""
    segments = [segment_rows(table, rank, ranks.size) for rank in range(ranks.size)]
    bounds = torch.tensor([segment.stop for segment in segments], device=CPU)
    sent = torch.bincount(torch.bucketize(table.own_rows, bounds, right=True), minlength=ranks.size)
    own = segments[ranks.rank]
    rows = [table.owners.rows_of(rank) for rank in range(ranks.size)]
    mine = [each[(each >= own.start) & (each < own.stop)] for each in rows]
    row_bytes = values.shape[1] * values.element_size()  # as bytes, since backends don't know all dtypes
    splits = [int(count) * row_bytes for count in sent]  # own rows ascend, as segments do
    sent_bytes = values.reshape(-1).view(torch.uint8)
    received = ranks.all_to_all(sent_bytes, splits, [each.numel() * row_bytes for each in mine])
    found = torch.empty(own.numel, values.shape[1], dtype=values.dtype, device=CPU)
    found[torch.cat(mine) - own.start] = received.view(values.dtype).view(-1, values.shape[1])
    return found
