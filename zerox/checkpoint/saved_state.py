"""The optimizer's state from a checkpoint: read into place if stored alike, else converted bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerox.checkpoint.blocks import are_alike, values_of
from zerox.checkpoint.names import OPTIMIZER
from zerox.checkpoint.saved_tables import SavedTables
from zerox.engine import Engine
from zerox.memory.bucket import Bucket, Member
from zerox.memory.stored import SCALE
from zerox.plan.form import num_blocks
from zerox.plan.span import Span
from zerox.rules.rule import MASK, MASTER, MASTERS, REMAINDER
from zerox.sliced_tensor import SlicedTensor
from zerox.state.fill import fill_row, start_anew
from zerox.state.sliced_state import STEP, blocks_of, scales_like, sliced_state

Saved = Mapping[str, TensorStorageMetadata]
Read = Callable[[dict[str, Any]], None]  # fills tensors by their names in the checkpoint
STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


class SavedState:
    """The state that a checkpoint has of an optimizer's parameters. ``host``: the contents of its host.pt."""

    def __init__(self, optimizer: Engine, names: Mapping[int, str], saved: Saved, host: Mapping[str, Any]) -> None:
        self.buckets = optimizer.inside.buckets
        self.rules = {m.number: bucket.rule for bucket in self.buckets for m in bucket.members}
        self.saved = saved
        self.names = names
        self.order: Mapping[str, list[int]] = host["memory_order"]
        self.group_of = {name: group for group in host["groups"] for name in group["names"]}
        self.tables = SavedTables(optimizer.inside.tables, names, saved, self.group_of)
        trained = {id(member.param) for bucket in self.buckets for member in bucket.members}
        self.masked = {b.members[slot].number for b in self.buckets if b.mask is not None for slot in b.mask.slots}
        self.trained = [member for member in optimizer.inside.members if id(member.param) in trained]
        for member in self.trained:
            if (group := self.group_of.get(names[member.number])) is not None:
                self.rules[member.number].late(group)  # which may learn what a class keeps under the saved options

    def _key(self, member: Member, what: str) -> str:
        return f"{OPTIMIZER}{self.names[member.number]}.{what}"

    def _expected(self, member: Member) -> Iterator[tuple[str, tuple[int, ...], tuple[torch.dtype, ...]]]:
        """(key, shape, possible dtypes) of each tensor that may be saved of a parameter."""
        shape, numel = tuple(member.param.shape), member.param.numel()
        yield STEP, (), (torch.int64,)
        for number in self.rules[member.number].numbers:
            yield number.key, (), (getattr(torch, number.dtype),)
        specs = self.rules[member.number].states
        for spec in (*specs, *MASTERS, MASK) if numel else ():
            yield spec.key, shape, (getattr(torch, spec.form.dtype),) if spec.form else STATE_DTYPES
        for spec in specs if numel else ():
            yield spec.key + SCALE, (num_blocks(numel),), (torch.float32,)

    def _needed(self, member: Member) -> Iterator[str]:
        group = self.group_of.get(self.names[member.number])
        if member.number in self.masked and member.param.numel():
            yield MASK.key  # without it, the weights that are loaded would lose what some other mask says
        if not self._was_saved(member) and group is not None:
            return  # it was frozen, or had no gradient yet: its state starts now
        yield STEP
        rule = self.rules[member.number]
        for number in rule.numbers:
            if group is not None and rule.is_wanted(number, group):
                yield number.key
        for spec in rule.states if member.param.numel() else ():
            always = not spec.when and not rule.on_host
            if (always or (group is not None and rule.is_wanted(spec, group))) and not rule.starts_itself(spec.key):
                yield spec.key
            if self._dtype(member, spec.key) is torch.uint8:
                yield spec.key + SCALE

    def known(self) -> Iterator[str]:
        """Names of all tensors that may be saved of these parameters."""
        for member in self.trained:
            yield from (self._key(member, what) for what, _, _ in self._expected(member))
        yield from self.tables.known()

    def needed(self) -> Iterator[str]:
        """Names of those without which they can't go on."""
        for member in self.trained:
            yield from (self._key(member, what) for what in self._needed(member))
        yield from self.tables.needed()

    def misfits(self) -> list[str]:
        """Lines for tensors of another shape or dtype."""
        found = list(self.tables.misfits())
        for member in self.trained:
            for what, shape, dtypes in self._expected(member):
                then = self.saved.get(key := self._key(member, what))
                if then is None:
                    continue
                dtype = then.properties.dtype
                if tuple(then.size) != shape:
                    found.append(f"{key} was saved as {list(then.size)}, and is {list(shape)}")
                elif dtype not in dtypes:
                    found.append(f"{key} was saved as {dtype}, and can be {' or '.join(map(str, dtypes))}")
                elif what == MASK.key and member.number not in self.masked:
                    found.append(f"{key} was saved, and the zerox.Sparsity that there is has no mask for it")
                elif what == REMAINDER.key and member.param.dtype is not torch.bfloat16:
                    found.append(f"{key} is for a torch.bfloat16 parameter, and the parameter is {member.param.dtype}")
        return found

    # ---- loading

    def load(self, read: Read, first: dict[str, Any]) -> list[str]:
        """Reads ``first``, with the parameters, and this rank's state. Returns what had to be rounded.

        State that needs no conversion is read into its place, the rest into memory for one bucket.
        """
        for bucket in self.buckets:
            bucket.absent.clear()  # state_dict() has everything now, and what is loaded says anew what is absent
            for member, state in own_state(bucket):
                first |= {self._key(member, what): state[what] for what in state if self._is_alike(member, what, state)}
        read(first)
        rounded: dict[str, None] = {}
        for bucket in self.buckets:
            rounded |= dict.fromkeys(self._convert(bucket, read))
        rounded |= dict.fromkeys(self.tables.load(read))
        return list(rounded)

    def _dtype(self, member: Member, what: str) -> torch.dtype | None:
        """The dtype that it was saved in; None if it was not saved."""
        then = self.saved.get(self._key(member, what))
        return None if then is None else then.properties.dtype

    def _is_alike(self, member: Member, what: str, state: Mapping[str, SlicedTensor]) -> bool:
        """Whether it was saved as it is stored here; scales are if their codes are."""
        of = what.removesuffix(SCALE)
        if self._dtype(member, what) is None or self._dtype(member, of) is not state[of].dtype:
            return False
        return what != MASK.key and (state[of].dtype is not torch.uint8 or self._has_blocks(member))

    def _has_blocks(self, member: Member) -> bool:
        """Whether scales were saved of the blocks that are kept here."""
        return are_alike(member, self._order(member))

    def _order(self, member: Member) -> list[int]:
        return self.order.get(self.names[member.number], [])

    def _convert(self, bucket: Bucket, read: Read) -> list[str]:
        """Reads and converts everything for which _is_alike() is false."""
        rows: list[dict[str, Tensor]] = []
        wanted: dict[str, Any] = {}
        for member, state in own_state(bucket):
            rows.append({what: self._to_read(member, what, state) for what in self._to_convert(bucket, member, state)})
            wanted |= {self._key(member, what): tensor for what, tensor in rows[-1].items()}
        if wanted:
            read(wanted)
        rounded = []
        for row, ((member, state), found) in enumerate(zip(own_state(bucket), rows, strict=True)):
            parts = self._parts(bucket, member, found)
            if not self._was_saved(member):
                if self.names[member.number] in self.group_of:
                    fill_row(bucket, row, {}, rest_anew=True)
                continue
            own = bucket.own_segments[row].span
            for key, numbers in bucket.numbers.items():
                if self._dtype(member, key) is None:
                    numbers[row] = 0
            for spec in bucket.rule.states:
                may_lack = spec.when or bucket.rule.on_host
                if may_lack and spec.key in state and self._dtype(member, spec.key) is None:
                    start_anew(bucket, row, spec.key)
            masters = [spec for spec in MASTERS if self._dtype(member, spec.key) is not None]
            if bucket.master is not None and not masters:
                parts[MASTER.key] = bucket.param_shard[own.start : own.stop].float()
            elif bucket.master is None and masters:
                rounded.append("masters to the parameters' dtype")
            rounded += fill_row(bucket, row, parts, rest_anew=False)
        return rounded

    def _was_saved(self, member: Member) -> bool:
        return self._key(member, STEP) in self.saved

    def _to_convert(self, bucket: Bucket, member: Member, state: Mapping[str, SlicedTensor]) -> Iterator[str]:
        """Keys of state that was saved otherwise than it is stored here."""
        for key in (*bucket.numbers, *bucket.state, MASK.key):
            if key in state and not self._is_alike(member, key, state) and self._dtype(member, key) is not None:
                yield key
                if self._dtype(member, key) is torch.uint8:
                    yield key + SCALE
        for spec in MASTERS if bucket.master is not None else ():
            if spec.key not in state and self._dtype(member, spec.key) is not None:
                yield spec.key

    def _to_read(self, member: Member, what: str, state: Mapping[str, SlicedTensor]) -> Tensor:
        """Memory for this rank's segment of it, as it was saved; for all scales if they are of other blocks."""
        numbers = [STEP, *(spec.key for spec in self.rules[member.number].numbers)]
        then = self.saved[self._key(member, what)]
        dtype = then.properties.dtype
        if what in numbers:
            return SlicedTensor((), (), Span(0, 1), torch.empty(1, dtype=dtype, device="cpu"))
        like = next(state[key] for key in state if key not in numbers and not key.endswith(SCALE))
        if not what.endswith(SCALE):
            return like.fill_with(torch.empty(like.own.numel(), dtype=dtype, device=like.device))
        if not self._has_blocks(member):
            return torch.empty(then.size, dtype=dtype, device="cpu")
        return scales_like(member, like.span, torch.empty(blocks_of(like.span).numel, dtype=dtype, device=like.device))

    def _parts(self, bucket: Bucket, member: Member, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was read, for fill_row(): this rank's elements, 1-D."""
        specs = {spec.key: spec for spec in bucket.rule.states}
        parts = {}
        for what, tensor in found.items():
            scales = found.get(what + SCALE)
            if scales is not None and not isinstance(scales, SlicedTensor):
                assert isinstance(tensor, SlicedTensor)
                parts[what] = values_of(specs[what], tensor, scales, self._order(member))
            elif isinstance(tensor, SlicedTensor):
                parts[what] = tensor.own
        return parts


def own_state(bucket: Bucket) -> Iterator[tuple[Member, dict[str, SlicedTensor]]]:
    """State of parameters that have elements on this rank, as in ``bucket.own_segments``; without empty tensors."""
    for member, state in sliced_state(bucket):
        if state[STEP].own.numel():
            yield member, {what: tensor for what, tensor in state.items() if tensor.own.numel()}
