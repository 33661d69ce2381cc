"""What ``optimizer.state`` shows, and how what users write there is seen.

Note [What users write into optimizer.state]
Users of torch clear ``optimizer.state``, give a parameter ``{}``, take its entry away, or put other tensors there: all
of that is seen by the identity of each object, at a sync point next, and taken in (written_state.py); afterwards there
is what was shown before.

A rank has the state of its own shards only. Where ranks read each other's (pulled_state.py), the dict has all
parameters and whole tensors: Note [Live state] in live_tensor.py. Where they don't, or there is one rank, there lie
views of the state in buckets, and of tables; one that is written in place is the state itself. A view has this rank's
elements only, 1-D, and for other parameters ``state[p]`` gives a stand-in whose tensors have no elements, and NaN as
numbers, since only owners count: so the same loop runs on all ranks. It is no entry: ``values()``, ``items()`` and
``in`` know what this rank has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerox import _C as C
from zerox.memory.bucket import Bucket, Member
from zerox.memory.row_table import RowTable
from zerox.ranks.group import Ranks
from zerox.state.dcp_request import is_asked_by_dcp
from zerox.state.live_tensor import Live, LiveTensor
from zerox.state.row_state import own_state
from zerox.state.sliced_state import is_shown

Entry = dict[str, Any]


class LiveState(defaultdict[Any, Entry]):
    """``optimizer.state``. As a plain dict it has what users have put there.

    ``makers``: make the entries of the optimizer's parameters, once somebody asks for them. ``order``: those of them
    that count as entries.
    """

    def __init__(self, factory: Any = dict, *given: Any) -> None:
        """With arguments: a copy, as functions make that take a dict apart."""
        super().__init__(factory, *given)
        self.makers: dict[Any, Callable[[], Entry]] = {}
        self.views: dict[Any, Callable[[], Entry]] = {}  # the same, as this rank keeps them
        self.order: Sequence[Any] = ()
        self.counted: frozenset[Any] = frozenset()  # the same
        self.shown: dict[Any, Entry] = {}  # those that were asked for
        self.made: dict[Any, Entry] = {}  # the same, as they were made
        self.seen: list[object] = []
        self.in_place: list[Live] = []  # written since
        self.was_cleared = False

    def start(
        self, makers: dict[Any, Callable[[], Entry]], views: dict[Any, Callable[[], Entry]], order: Sequence[Any]
    ) -> None:
        """Empty, and as nobody has seen it."""
        super().clear()
        self.makers, self.views, self.order, self.counted = makers, views, order, frozenset(order)
        self.shown, self.made, self.seen = {}, {}, []
        self.was_cleared = False
        for live in self.in_place:
            live.written = None
        self.in_place.clear()

    def show(self, param: Any, entry: Entry, more: Entry, before: Entry) -> Entry:
        """Makes a parameter's, in this dict, beside what users keep there. ``before``: the tensors that it had, which
        users may hold."""
        made = self.made[param] = self.makers[param]()
        for key, old in before.items():
            new = made.get(key)
            if isinstance(old, LiveTensor) and isinstance(new, LiveTensor) and old.is_like(new):
                old.live.show_as(new.live)
                made[key] = old
        entry.clear()
        entry.update({**more, **self.made[param]})
        self.shown[param] = entry
        self.seen += objects_in({param: entry})
        return entry

    def put_there(self) -> dict[Any, Entry]:
        """By users."""
        return dict(zip(super().keys(), super().values(), strict=True))

    def _is_ours(self, key: Any) -> bool:
        return not self.was_cleared and key in self.makers

    def _is_taken_away(self, param: Any) -> bool:
        return not self.shown.get(param, True)

    # ---- as a dict of all its entries

    def __missing__(self, key: Any) -> Entry:
        if not self._is_ours(key):
            return super().__missing__(key)
        if is_asked_by_dcp():
            return self.views[key]()
        return self.shown[key] if key in self.shown else self.show(key, {}, {}, {})

    def __iter__(self) -> Iterator[Any]:
        ordered = dict.fromkeys(param for param in self.order if param in self)
        yield from ordered
        yield from [key for key in super().__iter__() if key not in ordered]

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        return self._is_ours(key) and key in self.counted and not self._is_taken_away(key)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __delitem__(self, key: Any) -> None:
        is_ours = self._is_ours(key) and not self._is_taken_away(key)
        if is_ours:
            self.__missing__(key)
            self.shown[key] = {}  # whoever holds the other dict keeps what is in it
        if super().__contains__(key) or not is_ours:
            super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        if not self._is_ours(key) or self._is_taken_away(key):
            return super().pop(key, *default)
        found = self[key]
        del self[key]
        return found

    def popitem(self) -> tuple[Any, Entry]:
        key = next(reversed(self), None)
        return super().popitem() if key is None else (key, self.pop(key))

    def clear(self) -> None:
        super().clear()
        self.was_cleared = True

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __repr__(self) -> str:
        return repr(self.copy())

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == (other.copy() if isinstance(other, LiveState) else other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else super().setdefault(key, default)

    def copy(self) -> Any:
        """As files have it."""
        return defaultdict(dict, {key: self[key] for key in self})

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        """A copy that shows nothing of an optimizer's: files don't know this class."""
        return defaultdict, (dict, dict(self.copy()))


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
    """``state``: the dict. ``seen``: what users had put there, when it was looked at. ``written``: by number, the
    parameters of which ranks have not told each other yet that this one wrote their state, each with whether that
    changed anything."""

    def __init__(self) -> None:
        self.state = LiveState()
        self.seen: list[object] = []
        self.written: dict[int, bool] = {}

    def show(
        self,
        found: Mapping[Any, Any],
        buckets: Sequence[Bucket],
        tables: Sequence[RowTable],
        ranks: Ranks,
        live: Callable[[int, int, int], Entry] | None,
    ) -> None:
        """Puts state where torch keeps it. What else users have in ``found``, which stood there, stays.

        ``live``: makes the state of a bucket's slot and row, if ranks read each other's.
        """
        state, kept = self.state, dict(_put_there(found))
        entries, before, is_gone = state.shown, state.made, found is not state or state.was_cleared
        views: dict[Any, Callable[[], Entry]] = {t.param: partial(own_state, t, ranks) for t in tables}
        whole, order = dict[Any, Callable[[], Entry]](), [table.member for table in tables]
        for index, bucket in enumerate(buckets):
            rows = {segment.slot: row for row, segment in enumerate(bucket.own_segments)}
            for slot, member in enumerate(bucket.members):
                views[member.param] = partial(_views, bucket, slot, rows.get(slot, -1))
                if live is not None:
                    whole[member.param] = partial(live, index, slot, rows.get(slot, -1))
            order += [member for slot, member in enumerate(bucket.members) if live is not None or slot in rows]
        order.sort(key=lambda member: member.number)
        makers = views | whole
        state.start(makers, views, [member.param for member in order])
        for param in [param for param in makers if param in kept or param in entries]:
            entry = entries.get(param, {})
            more = dict(kept.pop(param, {} if is_gone else entry) or {})
            state.show(param, entry, more, before.get(param, {}))
        state.update(kept)
        if buckets and not state:  # DCP's getters would call step(), on this rank alone
            state[buckets[0].members[0].param] = {}
        self.note_seen()

    def note_seen(self) -> None:
        self.seen = objects_in(self.state)

    def is_as_shown(self, found: object) -> bool:
        """``found``: what stands as ``optimizer.state``."""
        state = self.state
        return (
            found is state
            and not state.was_cleared
            and not state.in_place
            and C.has_same_objects(state, self.seen)
            and C.has_same_objects(state.shown, state.seen)
        )

    def writes(self, found: Mapping[Any, Any], buckets: Sequence[Bucket], tables: Sequence[RowTable]) -> list[Write]:
        """What was written since into the state of parameters in ``buckets`` and ``tables``."""
        places: list[tuple[Member, Any]] = [(table.member, table) for table in tables]
        for bucket in buckets:
            rows = {segment.slot: row for row, segment in enumerate(bucket.own_segments)}
            places += [(m, (bucket, rows[slot]) if slot in rows else None) for slot, m in enumerate(bucket.members)]
        shown = {id(value.live) for made in self.state.made.values() for value in made.values() if is_written(value)}
        if any(id(live) not in shown for live in self.state.in_place):
            raise ValueError("a tensor that it showed before, and does not show any more: take it from there anew")
        is_gone = found is not self.state or self.state.was_cleared
        is_all = is_gone and not any(_put_there_for(found, m.param) for m, place in places if place is not None)
        return [
            write
            for member, place in places
            for write in self._of(member, place, found, is_gone, is_all or member.param in self.state.counted)
        ]

    def _of(
        self, member: Member, place: Any, found: Mapping[Any, Any], is_gone: bool, is_removed: bool
    ) -> Iterator[Write]:
        """``is_removed``: whether its state is gone where the dict lacks it, as that of a rank without it may."""
        put, state = _put_there_for(found, member.param), self.state
        if put is None and not is_gone and member.param not in state.shown:
            return  # nobody has seen it
        is_new = put is not None and not any(put is each for each in self.seen)
        if place is None and put is not None and not put and not is_new:
            return  # this rank's own, for DCP
        now = put if put is not None else None if is_gone else state.shown[member.param]
        if member.param not in state.made:
            state.made[member.param] = state.makers[member.param]()
        made = state.made[member.param]
        if not now:
            if put is not None or not is_gone or is_removed:
                yield Write(member, place, made, None)
        elif place is None:
            if put is not None or any(now.get(key) is not value or is_written(value) for key, value in made.items()):
                yield Write(member, None, made, dict(now))
        else:
            values = {
                key: now[key] for key in made if key in now and (now[key] is not made[key] or is_written(now[key]))
            }
            missing = [key for key in made if key not in now]
            if values or missing:
                yield Write(member, place, made, values, missing)


def objects_in(state: Mapping[Any, Any]) -> list[object]:
    """What has_same_objects() of the extension compares."""
    found: list[object] = []
    for key, value in _put_there(state).items():
        found += (key, value)
        if isinstance(value, dict):
            found += value.values()
    return found


def is_written(value: Any) -> bool:
    """In place, and not taken yet."""
    return isinstance(value, LiveTensor) and value.live.written is not None


def _put_there(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return state.put_there() if isinstance(state, LiveState) else state


def _put_there_for(state: Mapping[Any, Any], param: Any) -> Any:
    return dict.get(state, param) if isinstance(state, dict) else state.get(param)


def _views(bucket: Bucket, slot: int, row: int) -> Entry:
    """Of a parameter that has no elements here, a stand-in."""
    if row >= 0:
        return dict(bucket.views_of(row))
    numbers = {key: torch.full((), math.nan, dtype=torch.float32, device="cpu") for key in bucket.numbers}
    shown = (stored for stored in bucket.state.values() if is_shown(bucket, stored, slot))
    kept = {key: values for stored in shown for key, values in stored.tensors().items()}
    return {**numbers, **{key: values.new_empty(0) for key, values in kept.items()}}
