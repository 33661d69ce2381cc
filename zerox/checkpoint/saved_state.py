"""The optimizer's state in a checkpoint: what is there, whether it fits, and from there to where it is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerox.checkpoint.saved_param import Read, Saved, SavedParam, dtypes_of
from zerox.checkpoint.saved_rows import SavedRows
from zerox.checkpoint.saved_tables import SavedTables
from zerox.engine import Engine
from zerox.memory.bucket import Member
from zerox.memory.stored import SCALE
from zerox.plan.form import SAVED, SAVED_OF_CLASSES, num_blocks
from zerox.rules.rule import MASK, MASTERS
from zerox.state.sliced_state import STEP


class SavedState:
    """The state that a checkpoint has of an optimizer's parameters. ``host``: the contents of its host.pt."""

    def __init__(self, optimizer: Engine, names: Mapping[int, str], saved: Saved, host: Mapping[str, Any]) -> None:
        group_of = {name: group for group in host["groups"] for name in group["names"]}
        live = {m.number: optimizer.param_groups[m.group]["params"] for m in optimizer.inside.members}
        orders = host["memory_order"]
        self.buckets = optimizer.inside.buckets
        self.rules = {m.number: bucket.rule for bucket in self.buckets for m in bucket.members}
        self.masked = {b.members[slot].number for b in self.buckets if b.mask is not None for slot in b.mask.slots}

        def saved_in(number: int, name: str) -> Mapping[str, Any] | None:
            return {**group_of[name], "params": live.get(number, ())} if name in group_of else None

        self.params = {
            number: SavedParam(name, saved, saved_in(number, name), orders.get(name, []))
            for number, name in names.items()
        }
        self.tables = SavedTables(optimizer.inside.tables, self.params)
        trained = {id(member.param) for bucket in self.buckets for member in bucket.members}
        self.trained = [member for member in optimizer.inside.members if id(member.param) in trained]
        for member in self.trained:
            if (group := self.params[member.number].group) is not None:
                self.rules[member.number].late(group)  # which may learn what a class keeps under the saved options

    def known(self) -> Iterator[str]:
        """Names of all tensors that may be saved of these parameters."""
        for member in self.trained:
            yield from (self.params[member.number].key(what) for what, _, _ in self._expected(member))
        yield from self.tables.known()

    def needed(self) -> Iterator[str]:
        """Names of those without which they can't go on."""
        for member in self.trained:
            yield from (self.params[member.number].key(what) for what in self._needed(member))
        yield from self.tables.needed()

    def misfits(self) -> list[str]:
        """Lines for tensors of another shape or dtype."""
        found = list(self.tables.misfits())
        for member in self.trained:
            saved = self.params[member.number]
            for what, shape, dtypes in self._expected(member):
                line = saved.misfit(what, shape, dtypes, member.param.dtype)
                if not line and what == MASK.key and saved.has(what) and member.number not in self.masked:
                    line = f"{saved.key(what)} was saved, and the zerox.Sparsity that there is has no mask for it"
                found += [line] * bool(line)
        return found

    def load(self, read: Read, first: dict[str, Any]) -> list[str]:
        """Reads ``first``, with the parameters, and this rank's state. Returns what had to be rounded."""
        rows = [SavedRows(bucket, self.params) for bucket in self.buckets]
        for each in rows:
            first |= each.in_place()
        read(first)
        rounded = [line for each in rows for line in each.convert(read)]
        return list(dict.fromkeys(rounded + self.tables.load(read)))

    def _expected(self, member: Member) -> Iterator[tuple[str, Sequence[int], tuple[torch.dtype, ...]]]:
        """(key, shape, possible dtypes) of each tensor that may be saved of a parameter."""
        shape, numel = tuple(member.param.shape), member.param.numel()
        rule = self.rules[member.number]
        yield STEP, (), (torch.int64,)
        for number in rule.numbers:
            yield number.key, (), (getattr(torch, number.dtype),)
        chosen = SAVED_OF_CLASSES if rule.on_host else SAVED
        shapes = [(spec, rule.shape_of(spec, shape)) for spec in rule.states]
        for spec, own in (*shapes, *((spec, shape) for spec in (*MASTERS, MASK))):
            if own is not None and 0 not in own:
                yield spec.key, own, dtypes_of([spec.form] if spec.form else chosen)
        for spec in rule.states if numel else ():
            yield spec.key + SCALE, (num_blocks(numel),), (torch.float32,)

    def _needed(self, member: Member) -> Iterator[str]:
        rule, saved = self.rules[member.number], self.params[member.number]
        group = saved.group
        if member.number in self.masked and member.param.numel():
            yield MASK.key  # without it, the weights that are loaded would lose what some other mask says
        if not saved.was_saved and group is not None:
            return  # it was frozen, or had no gradient yet: its state starts now
        yield STEP
        for number in rule.numbers:
            if group is not None and rule.is_wanted(number, group):
                yield number.key
        for spec in rule.states:
            shape = rule.shape_of(spec, member.param.shape)
            if shape is None or 0 in shape:
                continue
            always = not spec.when and not rule.on_host
            if (always or (group is not None and rule.is_wanted(spec, group))) and not rule.starts_itself(spec.key):
                yield spec.key
            if saved.has_scales(spec):
                yield spec.key + SCALE
