"""What users wrote into ``optimizer.state`` since it was shown, taken into buckets and tables: see shown_state.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerox.memory.bucket import Bucket, Member
from zerox.memory.row_table import RowTable
from zerox.memory.stored import SCALE, Stored, form_of
from zerox.model_names import quote
from zerox.ranks.subgroups import Subgroups
from zerox.rules.rule import MASTERS, STEP, NumberSpec, StateSpec
from zerox.sliced_tensor import SlicedTensor
from zerox.state.fill import fill_row, start_anew
from zerox.state.live_tensor import LiveTensor
from zerox.state.pulled_tensor import PulledTensor
from zerox.state.row_state import ROWS_OF, fill_kept
from zerox.state.shown_state import ShownState, Write, is_written
from zerox.state.state_dict import parts_given, say_rounded

OF_MASTERS = tuple(spec.key for spec in MASTERS)
Groups = Sequence[Mapping[str, Any]]
Place = tuple[int, int, int]  # which subgroup has a parameter, and its number


@dataclass(frozen=True)
class Written:
    """What was written, as this rank keeps it, and not taken in yet. ``has_changed``: whether it is more than copies of
    what was there. ``why_not``: why it can't be taken in; else empty."""

    parts: Sequence[tuple[Write, dict[str, Any] | None]] = ()
    has_changed: bool = False
    why_not: str = ""

    def take(self) -> None:
        """On this rank alone."""
        rounded: dict[str, None] = {}
        for write, own in self.parts:
            if own is None:
                _start_anew(write.place)
            elif isinstance(write.place, RowTable):
                rounded |= dict.fromkeys(_fill_table(write.place, own))
            elif write.place is not None:
                rounded |= dict.fromkeys(_fill_bucket(*write.place, own, write.missing))
        say_rounded(rounded)


def find_written(
    shown: ShownState, found: Mapping[Any, Any], buckets: Sequence[Bucket], tables: Sequence[RowTable], groups: Groups
) -> Written:
    """On this rank. Notes what other ranks have to hear of."""
    noted, shown.written = shown.written, {}  # what is read here is what there was when it was put there
    try:
        kept = _storages(buckets, tables)
        parts = [(write, _apart(_parts(write, groups), kept)) for write in shown.writes(found, buckets, tables)]
    except (ValueError, RuntimeError) as error:  # a copy of state that is no more
        return Written(why_not=f"optimizer.state was written: {error}")
    finally:
        shown.written = noted
    changed = {
        write.member.number: own is None or bool(own) or bool(write.missing) or _is_new_elsewhere(write)
        for write, own in parts
    }
    shown.written |= {number: shown.written.get(number, False) or new for number, new in changed.items()}
    return Written(parts, any(changed.values()))


def agree_on_written(
    shown: ShownState, why_not: str, buckets: Sequence[Bucket], tables: Sequence[RowTable], subgroups: Subgroups
) -> None:
    """RuntimeError on all ranks if one wrote a parameter's state and another, that has a part of it, did not, or if
    one can't take it in: ``why_not``. Collective. It raises again until they have, or state is loaded."""
    owned = {_place(subgroups, table.member): table.member for table in tables}
    of_all = {_place(subgroups, member): member for bucket in buckets for member in bucket.members} | owned
    for bucket in buckets:
        owned |= {_place(subgroups, bucket.members[s.slot]): bucket.members[s.slot] for s in bucket.own_segments}
    written = [[place, shown.written[place[-1]], of_all[place].name] for place in of_all if place[-1] in shown.written]
    said = [json.loads(each) for each in subgroups.ranks.all_gather_text(json.dumps([written, list(owned), why_not]))]
    by_rank = [({tuple(place) for place, _, _ in wrote}, set(map(tuple, owns))) for wrote, owns, _ in said]
    for rank, (wrote, _, refusal) in enumerate(said):
        if refusal:
            raise RuntimeError(f"zerox: rank {rank}: {refusal}")
        for place, has_changed, name in wrote:
            for other, (others, owns) in enumerate(by_rank):
                if has_changed and tuple(place) in owns - others:
                    here = of_all.get(tuple(place))  # not where it is another subgroup's
                    known = quote(name, None if here is None else here.param)
                    raise RuntimeError(
                        f"zerox: rank {rank} wrote optimizer.state of parameter {known}, and rank {other}, which has "
                        "state of it, did not: write the same on all ranks, or load_state_dict()"
                    )
    shown.written.clear()


# ---- inside


def _place(subgroups: Subgroups, member: Member) -> Place:
    subgroup = subgroups.of_group[member.group]
    return subgroup.exchange, subgroup.number, member.number


def _storages(buckets: Sequence[Bucket], tables: Sequence[RowTable]) -> set[int]:
    """Where state lies."""
    numbers = [tensor for bucket in buckets for tensor in bucket.numbers.values()]
    stored = [each for bucket in buckets for each in bucket.state.values()]
    stored += [each for table in tables for each in table.state.values()]
    tensors = numbers + [tensor for each in stored for tensor in each.tensors().values()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _apart(parts: dict[str, Any] | None, kept: set[int]) -> dict[str, Any] | None:
    """Copies of what lies in the state itself, as where two moments are exchanged: one is filled after the other."""
    if parts is None:
        return None
    is_kept = {
        key: isinstance(part, Tensor) and part.untyped_storage().data_ptr() in kept for key, part in parts.items()
    }
    return {key: part.clone() if is_kept[key] else part for key, part in parts.items()}


def _parts(write: Write, groups: Groups) -> dict[str, Any] | None:
    """What of it is new, as this rank keeps it: 1-D parts of a bucket's state, rows of a table's; None if the state is
    to start anew. ValueError for what does not fit."""
    if write.place is None:
        return {} if write.values else None
    if write.values is None:
        return None
    rule = write.place.rule if isinstance(write.place, RowTable) else write.place[0].rule
    states: dict[str, StateSpec] = {spec.key: spec for spec in rule.states}
    specs: dict[str, StateSpec | NumberSpec] = {**states, **{spec.key: spec for spec in rule.numbers}}
    needed = [
        key
        for key in write.missing
        if (key == STEP.key and rule.keeps_step)
        or (key in specs and rule.is_wanted(specs[key], groups[write.member.group]) and not rule.starts_itself(key))
    ]
    if needed:
        raise ValueError(
            f"{_of_param(write)} lacks {needed[0]!r}: give it all of {', '.join(write.shown)}, or {{}} to start anew"
        )
    new = {k: value for k, value in write.values.items() if k != ROWS_OF and not _is_same(value, write.shown[k])}
    if masters := [key for key in OF_MASTERS if key in new]:
        raise ValueError(
            f"{_of_param(write)} was given a {masters[0]!r}, and the parameter's own value belongs to it: call "
            "optimizer.set_full_state_(p, master=...) on all ranks"
        )
    if not new:
        return {}
    new = {key: _of_another(value, write.shown[key]) for key, value in new.items()}
    everything = {**write.shown, **write.values, **new}
    _check_numbers(write, {key: value for key, value in new.items() if write.shown[key].dim() == 0})
    keys = dict.fromkeys(key.removesuffix(SCALE) if key.removesuffix(SCALE) in write.shown else key for key in new)
    given = {key: everything[key] for key in keys}
    given |= {
        key + SCALE: everything[key + SCALE]
        for key, value in list(given.items())
        if isinstance(value, Tensor) and key + SCALE in everything and form_of(states.get(key), value.dtype).scaled
    }
    if isinstance(write.place, RowTable):
        return {key: _rows(write, write.place, value, write.shown[key]) for key, value in given.items()}
    return _parts_of_bucket(*write.place, write.member, given, write.shown)


def _of_param(write: Write) -> str:
    """For errors only: see quote()."""
    return f"state of parameter {write.member.quoted}"


def _parts_of_bucket(
    bucket: Bucket, row: int, member: Member, given: Mapping[str, Any], shown: Mapping[str, Any]
) -> dict[str, Tensor]:
    segment = bucket.own_segments[row]
    is_part = segment.span.numel != member.local.numel()
    own = {
        key: value.detach()
        for key, value in given.items()
        if is_part and _is_view(shown[key]) and isinstance(value, Tensor) and value.shape == shown[key].shape
    }
    whole = {key: value for key, value in given.items() if key not in own}
    found = own | parts_given(bucket, segment.slot, whole, segment.of_param)
    if STEP.key not in given:  # it goes on from the count that it has, but for state that would start anew
        count = bucket.steps[row].clone()
        is_begun = any(key in bucket.state for key in given) and not bucket.rule.keeps_step
        found[STEP.key] = count.clamp(min=1) if is_begun else count
    elif not bucket.rule.keeps_step and not bool(found[STEP.key]):
        raise ValueError(
            f"state of parameter {member.quoted} was given the step 0, which under {bucket.rule.name} says that it was "
            "never updated: give the parameter {} to start anew"
        )
    return found


def _of_another(value: Any, shown: Tensor) -> Any:
    """Whole, if it is another parameter's, of which this rank has other elements."""
    if not isinstance(shown, SlicedTensor) or not isinstance(value, PulledTensor):
        return value
    return value if (value.part, value.span) == (shown.part, shown.span) else value.pulled()


def _is_view(shown: Tensor) -> bool:
    """Of this rank's elements, and no whole tensor."""
    return shown.dim() > 0 and not isinstance(shown, SlicedTensor)


def _rows(write: Write, table: RowTable, value: Any, shown: Tensor) -> Any:
    if shown.dim() == 0 or value.shape == shown.shape:
        return value
    if value.shape[0] != table.param.shape[0] or value.shape[1:] != shown.shape[1:]:
        whole = (table.param.shape[0], *shown.shape[1:])
        raise ValueError(f"{_of_param(write)} was given {tuple(value.shape)} instead of {whole}")
    return value[table.own_rows.to(value.device)]


def _check_numbers(write: Write, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if not isinstance(value, bool | int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise ValueError(f"{_of_param(write)} was given {key}={value!r}, which must be one number")
        number = value.own if isinstance(value, SlicedTensor) else value
        if key == STEP.key and not (float(number) >= 0 and float(number).is_integer()):
            raise ValueError(
                f"{_of_param(write)} was given the step {float(number)}: it must be a whole number, 0 or more"
            )


def _is_new_elsewhere(write: Write) -> bool:
    """Of state that lies on other ranks only: whether what was written is no copy of its stand-in."""
    if write.place is not None or write.values is None:
        return False
    return any(
        key not in write.shown or is_written(value) or not _is_same(value, write.shown[key])
        for key, value in write.values.items()
    )


def _is_same(value: Any, shown: Tensor) -> bool:
    """Whether it is a copy of what was there, as frameworks make that move state to a device."""
    if isinstance(shown, SlicedTensor):
        now = shown.live.stored() if isinstance(shown, LiveTensor) else shown.own
        if isinstance(value, Tensor) and (not isinstance(value, SlicedTensor) or value.span != shown.span):
            return False  # a whole one, of which nobody else may know
        value, shown = value.own if isinstance(value, SlicedTensor) else value, now
    if not isinstance(value, Tensor):
        return shown.numel() == 1 and bool(shown == value)
    if value.shape != shown.shape or value.dtype != shown.dtype:
        return False
    there = value.detach().to(shown.device)
    return bool(((there == shown) | ((there != there) & (shown != shown))).all())  # NaN is the same as NaN


def _start_anew(place: tuple[Bucket, int] | RowTable | None) -> None:
    """A master stays: it is the parameter's exact value."""
    if isinstance(place, RowTable):
        place.step.fill_(0)
        for stored in place.state.values():
            stored.zero_()
    elif place is not None:
        bucket, row = place
        for numbers in bucket.numbers.values():
            numbers[row] = 0
        for key in _states_of(bucket):
            start_anew(bucket, row, key)


def _states_of(bucket: Bucket) -> Iterator[str]:
    return (key for key in bucket.state if key not in OF_MASTERS)


def _fill_bucket(bucket: Bucket, row: int, parts: Mapping[str, Tensor], missing: Sequence[str]) -> list[str]:
    rounded = fill_row(bucket, row, parts, rest_anew=False) if parts else []
    for key in missing:
        if key in _states_of(bucket):
            start_anew(bucket, row, key)
    return rounded


def _fill_table(table: RowTable, given: Mapping[str, Any]) -> list[str]:
    rounded = []
    for key, value in given.items():
        if key == STEP.key:
            table.step.fill_(int(value))
        elif key in table.state:
            kept = table.state[key]
            rounded += fill_kept(kept, Stored.given(kept.spec, value, given.get(key + SCALE)))
    return rounded
