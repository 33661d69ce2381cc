"""What ``optimizer.state`` shows of this rank's state, and how what users write there is seen.

Note [What users write into optimizer.state]
There lie views of the state in buckets, and of tables. A tensor that is written in place is the state itself. Users of
torch also clear ``optimizer.state``, give a parameter ``{}``, take its entry away, or put other tensors there: all of
that is seen by the identity of each object, at a sync point next, and taken in (written_state.py); afterwards there
are views again.

A rank has the state of its own shards only. For other parameters of the optimizer ``state[p]`` gives a stand-in whose
tensors have no elements, as a view has only those that the rank owns: so the same loop runs on all ranks. Its numbers
are NaN, since only owners count. It is no entry: ``values()``, ``items()`` and ``in`` know what this rank has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerox import _C as C
from zerox.memory.bucket import Bucket, Member
from zerox.memory.row_table import RowTable
from zerox.ranks.group import Ranks
from zerox.state.row_state import own_state

Entry = dict[str, Any]


class LiveState(defaultdict[Any, Entry]):
    """``optimizer.state``. ``elsewhere``: the bucket of each parameter that has no elements on this rank."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.elsewhere: dict[Any, Bucket] = {}
        self.stand_ins: dict[Any, Entry] = {}  # those that were asked for
        self.made: dict[Any, Entry] = {}  # the same, as they were made
        self.seen_stand_ins: list[object] = []
        self.was_cleared = False

    def __missing__(self, key: Any) -> Entry:
        if key not in self.elsewhere:
            return super().__missing__(key)
        if key not in self.stand_ins:
            self.made[key] = _stand_in(self.elsewhere[key])
            self.stand_ins[key] = dict(self.made[key])
            self.seen_stand_ins += objects_in({key: self.stand_ins[key]})
        return self.stand_ins[key]

    def __delitem__(self, key: Any) -> None:
        if key in self or key not in self.elsewhere:
            super().__delitem__(key)
        else:
            self[key].clear()

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self or key not in self.elsewhere:
            return super().pop(key, *default)
        found = dict(self[key])
        del self[key]
        return found

    def clear(self) -> None:
        super().clear()
        self.was_cleared = True

    def start(self, elsewhere: dict[Any, Bucket]) -> None:
        """Empty, and as nobody has seen it."""
        super().clear()
        self.elsewhere = elsewhere
        self.stand_ins, self.made, self.seen_stand_ins = {}, {}, []
        self.was_cleared = False

    def copy(self) -> Any:
        """As files have it."""
        return defaultdict(dict, self)

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        """A copy that shows nothing of an optimizer's: files don't know this class."""
        return defaultdict, (dict, dict(self))


@dataclass(frozen=True)
class Write:
    """What was written of one parameter's state on this rank: ``values`` by key; None: its entry is gone, or empty.
    ``shown``: what was there before."""

    member: Member
    place: tuple[Bucket, int] | RowTable | None  # a bucket with this rank's row in it, or a table
    shown: Mapping[str, Any]
    values: Mapping[str, Any] | None
    missing: Sequence[str] = ()  # keys that were taken away


class ShownState:
    """``state``: the dict. ``written``: by number, the parameters of which ranks have not told each other yet that this
    one wrote their state, each with whether that changed anything."""

    def __init__(self) -> None:
        self.state = LiveState()
        self.views: dict[Any, Entry] = {}  # what of it was shown, by parameter
        self.entries: dict[Any, Entry] = {}  # the dicts that it was shown in, which users may hold
        self.seen: list[object] = []
        self.written: dict[int, bool] = {}

    def show(
        self, found: Mapping[Any, Any], buckets: Sequence[Bucket], tables: Sequence[RowTable], ranks: Ranks
    ) -> None:
        """Puts views where torch keeps state. What else users have in ``found``, which stood there, stays."""
        kept = dict(found)
        self.views = {param: state for bucket in buckets for param, state in bucket.state_of_own()}
        self.views |= {table.param: own_state(table, ranks) for table in tables}
        members = [(member.param, bucket) for bucket in buckets for member in bucket.members]
        self.state.start({param: bucket for param, bucket in members if param not in self.views})
        entries, self.entries = self.entries, {}
        for param, views in self.views.items():
            more = dict(kept.pop(param, None) or {})
            self.state[param] = self.entries[param] = entries.get(param, {})
            self.entries[param].clear()
            self.entries[param].update({**more, **views})
        self.state.update({key: value for key, value in kept.items() if key not in self.state.elsewhere})
        if buckets and not self.views:  # DCP's getters would call step(), on this rank alone
            self.state[buckets[0].members[0].param] = {}
        self.note_seen()

    def note_seen(self) -> None:
        self.seen = objects_in(self.state)

    def is_as_shown(self, found: object) -> bool:
        """``found``: what stands as ``optimizer.state``. About 0.02 us a parameter."""
        state = self.state
        return (
            found is state
            and not state.was_cleared
            and C.has_same_objects(state, self.seen)
            and C.has_same_objects(state.stand_ins, state.seen_stand_ins)
        )

    def writes(self, found: Mapping[Any, Any], buckets: Sequence[Bucket], tables: Sequence[RowTable]) -> list[Write]:
        """What was written since into the state of parameters in ``buckets`` and ``tables``."""
        places: list[tuple[Member, Any]] = [(table.member, table) for table in tables]
        for bucket in buckets:
            rows = {segment.slot: row for row, segment in enumerate(bucket.own_segments)}
            places += [(m, (bucket, rows[slot]) if slot in rows else None) for slot, m in enumerate(bucket.members)]
        own = [(member, place) for member, place in places if place is not None]
        of_own = [write for member, place in own for write in self._of_own(member, place, found)]
        is_all = (found is not self.state or self.state.was_cleared) and not any(found.get(m.param) for m, _ in own)
        others = [member for member, place in places if place is None]
        return [*of_own, *(write for member in others for write in self._of_other(member, found, is_all))]

    def _of_own(self, member: Member, place: Any, found: Mapping[Any, Any]) -> Iterator[Write]:
        shown, now = self.views[member.param], found.get(member.param)
        if not now:
            yield Write(member, place, shown, None)
            return
        values = {key: now[key] for key in shown if key in now and now[key] is not shown[key]}
        missing = [key for key in shown if key not in now]
        if values or missing:
            yield Write(member, place, shown, values, missing)

    def _of_other(self, member: Member, found: Mapping[Any, Any], is_all: bool) -> Iterator[Write]:
        entry, made = found.get(member.param), self.state.made.get(member.param, {})
        stand_in = self.state.stand_ins.get(member.param, {})
        if entry:
            yield Write(member, None, made, dict(entry))
        elif is_all or (entry is not None and not any(entry is each for each in self.seen)):
            yield Write(member, None, made, None)
        elif any(stand_in.get(key) is not value for key, value in made.items()):
            yield Write(member, None, made, dict(stand_in) or None)


def objects_in(state: Mapping[Any, Any]) -> list[object]:
    """What has_same_objects() of the extension compares."""
    found: list[object] = []
    for key, value in state.items():
        found += (key, value)
        if isinstance(value, dict):
            found += value.values()
    return found


def _stand_in(bucket: Bucket) -> Entry:
    """Of a parameter that has no elements here."""
    numbers = {key: torch.full((), math.nan, dtype=torch.float32, device="cpu") for key in bucket.numbers}
    kept = {key: values for stored in bucket.state.values() for key, values in stored.tensors().items()}
    return {**numbers, **{key: values.new_empty(0) for key, values in kept.items()}}
