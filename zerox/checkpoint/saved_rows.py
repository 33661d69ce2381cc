"""A bucket's state from a checkpoint: first a table of how each part of it comes, then what the table says.

State that needs no conversion is read into its place, the rest into memory for one bucket.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox.checkpoint.blocks import are_alike, values_of
from zerox.checkpoint.saved_param import Read, SavedParam
from zerox.memory.bucket import Bucket, Member
from zerox.memory.stored import SCALE
from zerox.plan.span import Span
from zerox.rules.rule import MASK, MASTER, MASTERS
from zerox.sliced_tensor import SlicedTensor
from zerox.state.fill import fill_row, start_anew
from zerox.state.sliced_state import STEP, blocks_of, scales_like, sliced_state

State = Mapping[str, SlicedTensor]


class Move(enum.Enum):
    IN_PLACE = "it was saved as it is stored"
    CONVERTED = "it was saved otherwise"
    ANEW = "it was not saved, and begins"
    FROM_PARAM = "no master was saved: the parameter's value is exact"
    DROPPED = "a master was saved, and none is kept"


@dataclass(frozen=True)
class Row:
    """A parameter that has elements on this rank, and how what there is under each key comes.

    ``has_blocks``: scales were saved of the blocks that are kept here.
    """

    saved: SavedParam
    moves: Mapping[str, Move]
    has_blocks: bool

    def keys(self, move: Move) -> list[str]:
        return [key for key, each in self.moves.items() if each is move]


class SavedRows:
    """``rows``: as in ``bucket.own_segments``. ``saved``: what a checkpoint has of each parameter, by its number."""

    def __init__(self, bucket: Bucket, saved: Mapping[int, SavedParam]) -> None:
        bucket.absent.clear()  # state_dict() has everything now, and what is loaded says anew what is absent
        self.bucket = bucket
        self.rows = [_row(bucket, member, state, saved[member.number]) for member, state in own_state(bucket)]

    def in_place(self) -> dict[str, SlicedTensor]:
        """By name, what a read fills in its place."""
        pairs = zip(self.rows, own_state(self.bucket), strict=True)
        return {row.saved.key(key): state[key] for row, (_, state) in pairs for key in row.keys(Move.IN_PLACE)}

    def convert(self, read: Read) -> list[str]:
        """Reads the rest, and converts it. Returns what had to be rounded."""
        found: list[dict[str, Tensor]] = []
        wanted: dict[str, Any] = {}
        for row, (member, state) in zip(self.rows, own_state(self.bucket), strict=True):
            found.append({key: self._to_read(row, member, state, key) for key in row.keys(Move.CONVERTED)})
            wanted |= {row.saved.key(key): tensor for key, tensor in found[-1].items()}
        if wanted:
            read(wanted)
        return [line for place, row in enumerate(self.rows) for line in self._fill(place, row, found[place])]

    def _fill(self, place: int, row: Row, found: Mapping[str, Tensor]) -> list[str]:
        bucket = self.bucket
        if not row.saved.was_saved:
            if row.saved.group is not None:
                fill_row(bucket, place, {}, rest_anew=True)
            return []
        parts = self._parts(row, found)
        for key in row.keys(Move.ANEW):
            if key in bucket.numbers:
                bucket.numbers[key][place] = 0
            else:
                start_anew(bucket, place, key)
        if row.keys(Move.FROM_PARAM):
            own = bucket.own_segments[place].span
            parts[MASTER.key] = bucket.param_shard[own.start : own.stop].float()
        dropped = ["masters to the parameters' dtype"] if row.keys(Move.DROPPED) else []
        return dropped + fill_row(bucket, place, parts, rest_anew=False)

    def _to_read(self, row: Row, member: Member, state: State, key: str) -> Tensor:
        """Memory for this rank's segment of it, as it was saved; for all scales if they are of other blocks."""
        dtype, numbers = row.saved.dtype(key), self.bucket.numbers
        if key in numbers:
            return SlicedTensor((), (), Span(0, 1), torch.empty(1, dtype=dtype, device="cpu"))
        like = state.get(key.removesuffix(SCALE))
        if like is None:  # a master in another form
            assert self.bucket.master is not None
            like = state[self.bucket.master.spec.key]
        if not key.endswith(SCALE):
            return like.fill_with(torch.empty(like.own.numel(), dtype=dtype, device=like.device))
        if not row.has_blocks:
            return torch.empty(row.saved.shape(key), dtype=dtype, device="cpu")
        return scales_like(member, like.span, torch.empty(blocks_of(like.span).numel, dtype=dtype, device=like.device))

    def _parts(self, row: Row, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was read, for fill_row(): this rank's elements, 1-D."""
        parts = {}
        for key, tensor in found.items():
            scales = found.get(key + SCALE)
            if scales is not None and not isinstance(scales, SlicedTensor):
                assert isinstance(tensor, SlicedTensor)
                parts[key] = values_of(self.bucket.state[key].spec, tensor, scales, list(row.saved.order))
            elif isinstance(tensor, SlicedTensor):
                parts[key] = tensor.own
        return parts


def own_state(bucket: Bucket) -> Iterator[tuple[Member, dict[str, SlicedTensor]]]:
    """State of parameters that have elements on this rank, as in ``bucket.own_segments``; without empty tensors."""
    for member, state in sliced_state(bucket):
        if state[STEP].own.numel():
            yield member, {what: tensor for what, tensor in state.items() if tensor.own.numel()}


def _row(bucket: Bucket, member: Member, state: State, saved: SavedParam) -> Row:
    has_blocks = are_alike(member, list(saved.order))
    moves: dict[str, Move] = {}
    for key, numbers in bucket.numbers.items():
        if not saved.has(key):
            moves[key] = Move.ANEW
        else:
            moves[key] = Move.IN_PLACE if saved.dtype(key) is numbers.dtype else Move.CONVERTED
    for key in [key for key in bucket.state if key in state]:
        moves |= _moves_of(bucket, key, saved, has_blocks)
    if MASK.key in state and saved.has(MASK.key):
        moves[MASK.key] = Move.CONVERTED
    return Row(saved, moves | _moves_of_masters(bucket, state, saved), has_blocks)


def _moves_of(bucket: Bucket, key: str, saved: SavedParam, has_blocks: bool) -> dict[str, Move]:
    """Of one state, and of its scales. Without a move it stays."""
    stored = bucket.state[key]
    form = saved.form(stored.spec)
    if form is None:
        may_lack = stored.spec not in MASTERS and (stored.spec.when or bucket.rule.on_host)
        return {key: Move.ANEW} if may_lack else {}
    whats = [key, key + SCALE] if form.scaled else [key]
    if form == stored.form and (has_blocks or not form.scaled):
        return dict.fromkeys(filter(saved.has, whats), Move.IN_PLACE)
    return dict.fromkeys(whats, Move.CONVERTED)


def _moves_of_masters(bucket: Bucket, state: State, saved: SavedParam) -> dict[str, Move]:
    """Of those that are not kept as they were saved."""
    there = [spec.key for spec in MASTERS if saved.has(spec.key)]
    if bucket.master is None:
        return dict.fromkeys(there, Move.DROPPED)
    if not there:
        return {bucket.master.spec.key: Move.FROM_PARAM}
    return {key: Move.CONVERTED for key in there if key not in state}
