"""The whole state on one rank or on all, in the form of the rule's torch.optim class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket
from zerox.memory.forms import decode, master_of
from zerox.memory.one_param import OneParam
from zerox.memory.state_layout import StateLayout
from zerox.memory.stored import Stored
from zerox.plan.form import FLOAT32, FLOAT64
from zerox.plan.layout import Segment
from zerox.plan.span import Span
from zerox.ranks.dtensors import cuts_of, whole_of
from zerox.ranks.group import CPU, Ranks
from zerox.ranks.subgroups import Subgroup, Subgroups
from zerox.rules.rule import MASK, MASTER, REMAINDER, STEP, NumberSpec, Rule, StateSpec
from zerox.state.sliced_state import is_shown


def full_state(
    buckets: Sequence[Bucket], subgroups: Subgroups, to: int | None = 0, device: torch.device = CPU, keeps: bool = True
) -> dict[int, dict[str, Any]]:
    """By parameters' numbers, on ``device`` of rank ``to`` (None: of all ranks); elsewhere nothing.

    It is of the parameters that rank ``to`` has. Numbers are on the CPU, as in torch. Collective; one bucket of one
    kind of state is gathered at a time. Of DTensors the whole state, for which all ranks of their mesh call this; those
    that it is not for keep nothing: not ``keeps``.
    """
    found: dict[int, dict[str, Any]] = {}
    for bucket, subgroup, root in of_rank(buckets, subgroups, to):
        ranks = subgroup.ranks
        segments = [bucket.plan.layout.segments(ranks.shard_of(rank)) for rank in range(ranks.size)]
        for spec in (bucket.rule.step, *bucket.rule.numbers):
            everyones = _all_gather(bucket.numbers[spec.key], segments, ranks, root)
            for rank, numbers in enumerate(everyones):
                for segment, number in zip(segments[rank], numbers.cpu(), strict=False):
                    shown = spec.show(number.clone())
                    found.setdefault(bucket.members[segment.slot].number, {})[spec.key] = shown
        absent = _absent(bucket, segments, ranks, root)
        for stored in in_full(bucket):
            lies = bucket.layout_of(stored)
            shards = ranks.gather(_padded(stored.values, lies.layout.shard_numel), root)
            for slot, whole in _assemble(lies, ranks, shards, device) if shards else ():
                if (slot, stored.spec.key) not in absent and is_shown(bucket, stored, slot):
                    found[bucket.members[slot].number][stored.spec.key] = whole
    if not found:
        return {}
    for member in sorted((m for bucket in buckets for m in bucket.members), key=lambda m: m.number):
        own = found[member.number]  # in this order: ranks with other parts of the model may have other buckets
        for key in sorted(own) if cuts_of(member.param) else ():
            if own[key].dim():
                own[key] = whole_of(member.param, own[key])
        if not keeps:
            del found[member.number]
    return dict(sorted(found.items()))


def of_rank(
    buckets: Sequence[Bucket], subgroups: Subgroups, to: int | None
) -> Iterator[tuple[Bucket, Subgroup, int | None]]:
    """The buckets that rank ``to`` (None: each rank) has, with who has them, and what rank ``to`` is there."""
    for bucket in buckets:
        subgroup = subgroups.of_group[bucket.members[0].group]
        root = None if to is None else subgroup.number_of(to)
        if to is None or root is not None:
            yield bucket, subgroup, root


def full_state_of(one: OneParam) -> dict[str, Any]:
    """The same of one parameter, on its device on all ranks. Collective; only its own elements are sent."""
    bucket, row = one.bucket, one.own_row
    found: dict[str, Any] = {}
    for spec in (bucket.rule.step, *bucket.rule.numbers):
        numbers = bucket.numbers[spec.key]
        number = numbers.new_zeros(1) if row is None else numbers[row : row + 1]
        found[spec.key] = spec.show(one.from_owner(number, spec.key).cpu()[0])
    own_absent = "\n".join(key for absent_row, key in bucket.absent if absent_row == row)
    absent = {key for said in one.ranks.all_gather_text(own_absent) for key in said.splitlines()}
    for kept in bucket.state.values():  # without a mask, which is sparsity.masks()'s
        stored = _in_full(bucket, kept, bucket.layout_of(kept).segment(-1 if row is None else row).span)
        if stored.spec.key not in absent and is_shown(bucket, stored, one.slot):
            own = None if row is None else stored.values
            local = one.all_gather(own, stored.values.dtype, stored.spec.key, stored.layout)
            found[stored.spec.key] = whole_of(one.member.param, local)
    return found


def show_in_group(rule: Rule, group: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """What of a parameter's whole state the rule's torch class would show in this param group.

    Zeros are not how every class begins, and torch has no state before a first update, nor in groups whose options
    don't ask for it.
    """
    if not rule.on_host:
        return state
    if not state[STEP.key]:
        return {}
    specs: list[StateSpec | NumberSpec] = [*rule.states, *rule.numbers]
    unwanted = {spec.key for spec in specs if not rule.is_wanted(spec, group)}
    return {key: value for key, value in state.items() if key not in unwanted}


def _all_gather(
    numbers: Tensor, segments: Sequence[Sequence[Segment]], ranks: Ranks, to: int | None
) -> Sequence[Tensor]:
    """One number for each row, of every rank: ranks have different counts of rows."""
    return ranks.gather(_padded(numbers, max(map(len, segments))), to)


def _padded(values: Tensor, numel: int) -> Tensor:
    """As many on all ranks as the one has that has most."""
    if values.numel() == numel:
        return values
    padded = values.new_zeros(numel)
    padded[: values.numel()] = values
    return padded


def _absent(
    bucket: Bucket, segments: Sequence[Sequence[Segment]], ranks: Ranks, to: int | None
) -> set[tuple[int, str]]:
    """(slot, key) of state that has not begun. All ranks gather it, or none."""
    found = set()
    for key in [key for key in bucket.state if bucket.rule.starts_itself(key)]:
        rows = [(row, key) in bucket.absent for row in range(len(bucket.own_segments))]
        flags = torch.tensor(rows, dtype=torch.uint8, device=CPU)
        for own, theirs in zip(segments, _all_gather(flags, segments, ranks, to), strict=False):
            found |= {(segment.slot, key) for segment, flag in zip(own, theirs, strict=False) if flag}
    return found


def in_full(bucket: Bucket) -> Iterator[Stored]:
    """The state of the own shard in float32 or float64, in whatever form it is stored."""
    for stored in bucket.shown_state():
        yield _in_full(bucket, stored, Span(0, stored.values.numel()))


def _in_full(bucket: Bucket, stored: Stored, elements: Span) -> Stored:
    """Some of it: ``elements`` start with a block."""
    within = slice(elements.start, elements.stop)
    part = stored.part(within)
    if stored.spec == MASK:
        return part
    if stored.spec == REMAINDER:
        return Stored(MASTER, FLOAT32, master_of(bucket.params_now()[within], part.values))
    wide = decode(part)
    form = FLOAT64 if wide.dtype is torch.float64 else FLOAT32
    return Stored(stored.spec, form, wide.to(getattr(torch, form.dtype)), layout=stored.layout)


def _assemble(
    lies: StateLayout, ranks: Ranks, shards: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Whole tensors by slot, from each rank's shard, as the parameters lay when the optimizer was built: they may have
    left since, for another device or another order in memory."""
    wholes = {}
    for slot, (shape, strides) in enumerate(zip(lies.shapes, lies.strides, strict=True)):
        wholes[slot] = torch.empty_strided(shape or (), strides, dtype=shards[0].dtype, device=device)
    for rank, shard in enumerate(shards):
        for segment in lies.layout.segments(ranks.shard_of(rank)):
            flat = wholes[segment.slot].as_strided((wholes[segment.slot].numel(),), (1,))
            part = shard[segment.span.start : segment.span.stop]
            flat[segment.param_start : segment.param_start + part.numel()] = part
    yield from wholes.items()
