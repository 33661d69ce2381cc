"""A rank's own state into a state_dict() and out of it: its share, or whole tensors, all of it or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket, Member
from zerox.memory.forms import decode
from zerox.memory.row_table import SPARSE
from zerox.memory.state_layout import row_major
from zerox.memory.stored import SCALE, Stored, form_of
from zerox.options import DIVISOR, OF_OPTIMIZER
from zerox.plan.form import num_blocks
from zerox.plan.span import Span
from zerox.plan.state_layout import Shape
from zerox.ranks.calls import warn_caller
from zerox.ranks.dtensors import cuts_of, part_of
from zerox.rules.of_groups import RULE, Rules
from zerox.rules.rule import MASK, MASTERS, NumberSpec, Rule, StateSpec
from zerox.sliced_tensor import SlicedTensor
from zerox.state.codes import mark, unmark
from zerox.state.fill import fill_row
from zerox.state.sliced_state import OF_ONE_RANK, STEP, blocks_of

WHOLE_NUMBER = Span(0, 1)


def pack_with(
    state: Mapping[int, Any] | None, buckets: Sequence[Bucket], packed: dict[str, Any], places: Mapping[int, int]
) -> dict[str, Any]:
    """torch's ``packed`` state_dict(), with this ``state``, if any, by parameters' numbers in place of theirs.

    ``places``: where torch counts parameters, by number, if that is not the same.

    Other entries, which users keep there, stay. Numbers are as the rule's torch.optim class keeps them: steps are
    float32, since foreach and fused paths take no other dtype, and from 2**24 on they are rounded, as in torch.
    """
    rules = {places.get(m.number, m.number): bucket.rule for bucket in buckets for m in bucket.members}
    if state is not None:
        state = {places.get(number, number): kept for number, kept in state.items()}
        others = {key: value for key, value in packed["state"].items() if key not in rules and key not in state}
        packed = {**packed, "state": {**dict(sorted(state.items())), **others}}
    shown = {key: _show_state(rules.get(key), value) for key, value in packed["state"].items()}
    for number, key in set().union(*(bucket.absent_state() for bucket in buckets)):
        shown.get(places.get(number, number), {}).pop(key, None)
    return {**packed, "state": shown}


def _show_state(rule: Rule | None, state: Any) -> Any:
    """One parameter's, or what a user keeps there."""
    if not isinstance(state, dict):
        return state
    state = mark(state)
    if rule is None:
        return state
    found = {spec.key: spec for spec in (rule.step, *rule.numbers) if spec.key in state}
    return state | {key: _show(spec, state[key]) for key, spec in found.items()}


def _show(spec: NumberSpec, number: Any) -> Any:
    """A rank's segment of a number stays one: it says whether the rank has it."""
    if isinstance(number, SlicedTensor):
        # Not number.to(): torch imports torch.distributed.tensor for the first operator of any class of tensors.
        return number.fill_with(number.own.to(getattr(torch, spec.dtype)))
    return spec.show(number) if isinstance(number, Tensor) else number


# Note [Loading state]
# torch's load_state_dict() does much that users expect of ours too: it runs the hooks, compares the groups, and finds
# each number's parameter. But it also casts state to the parameters' dtype, in which 16 bits are too few for moments,
# and no method of ours can prevent that: the cast is a static method of torch's class. It leaves alone objects that are
# neither tensors nor iterable, so state travels through it as Uncast. Then, before the post-hooks, it calls
# __setstate__(), which takes the state. The alternative is to run torch's private lists of hooks ourselves.
@dataclass(frozen=True)
class Uncast:
    """The state of one parameter, in a form that torch leaves alone: see Note [Loading state]."""

    state: Mapping[str, Any]


@contextmanager
def state_uncast(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``load_state_dict()`` wraps state as :class:`Uncast`, after the user's own hooks."""

    def wrap(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {key: Uncast(unmark(state)) for key, state in given["state"].items()}}

    handle = optimizer.register_load_state_dict_pre_hook(wrap)
    try:
        yield
    finally:
        handle.remove()


def check_groups(rules: Rules, live: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> None:
    """ValueError naming the first param group that was saved with another rule; else as its rule's check_loaded()."""
    for index, (own, group) in enumerate(zip(live, loaded, strict=True)):
        rules.of(own).check_loaded(group)
        if why := rules.misfit(own, group):
            raise ValueError(f"param group {index} {why}: build the optimizer with the rule that its state is of")


def check_state(buckets: Sequence[Bucket], given: Mapping[Any, Uncast]) -> None:
    """ValueError naming the first parameter whose state does not fit, or lacks the part that this rank needs."""
    for bucket in buckets:
        members = {id(member.param): member for member in bucket.members}
        for param, uncast in given.items():
            if isinstance(param, Tensor) and id(param) in members:
                _check_whole(bucket.rule, members[id(param)], uncast.state)
                _check_mask(bucket, members[id(param)], uncast.state)
        for segment in bucket.own_segments:
            member = bucket.members[segment.slot]
            if member.param in given:
                _parts(bucket, segment.slot, given[member.param].state, segment.of_param)


def fill_state(buckets: Sequence[Bucket], given: Mapping[Any, Uncast]) -> None:
    """Copies values in place. State that isn't given starts anew, as in torch."""
    rounded: dict[str, None] = {}
    for bucket in buckets:
        for row, segment in enumerate(bucket.own_segments):
            member = bucket.members[segment.slot]
            state = given[member.param].state if member.param in given else {}
            parts = _parts(bucket, segment.slot, state, segment.of_param)
            rounded |= dict.fromkeys(fill_row(bucket, row, parts, rest_anew=True))
    say_rounded(rounded)


def groups_to_take(
    rules: Rules, live: Sequence[dict[str, Any]], loaded: Sequence[dict[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Saved param groups, but with options that only a constructor decides as in the ``live`` ones.

    Options that an older state_dict didn't know take the optimizer's defaults, or those of the group's own rule.
    """
    pairs = list(zip(live, loaded, strict=True))
    say_what_stays(rules, pairs)
    return [{**rules.defaults_of(own, defaults), **take_options(rules, own, group)} for own, group in pairs]


def take_options(rules: Rules, live: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a group takes from a ``loaded`` one: all but its rule, and those of the constructor."""
    rule = rules.of(live)
    stay = [*(name for name in OF_OPTIMIZER if name not in rule.defaults), DIVISOR, RULE, SPARSE]
    kept = {key: live[key] for key in (*rule.lasting, *stay) if key in live}
    return {key: value for key, value in loaded.items() if key not in stay} | kept


def say_what_stays(rules: Rules, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Warns of pairs (live, saved) of different formulas, as AdamW's and Adam's weight decay are."""
    others: dict[str, list[int]] = {}
    for index, (own, saved) in enumerate(pairs):
        for option in rules.of(own).lasting:
            if saved.get(option, own[option]) != own[option]:
                others.setdefault(option, []).append(index)
    for option, indices in others.items():
        own, saved = pairs[indices[0]]
        rule = rules.of(own)
        as_torch = "" if rule.has_owners else f", as torch.optim.{rule.torch_class(saved)} has it"
        warn_caller(
            f"zerox: the state was saved with {option}={saved[option]}{as_torch}, and param groups {indices} keep "
            f"{option}={own[option]}. To go on as before, build the optimizer that way",
        )


def say_rounded(what: Mapping[str, None]) -> None:
    """Warns of state that was loaded into a form that holds less."""
    if what:
        names = ", ".join(what)
        warn_caller(f"zerox: rounded, since it was saved in a form that holds more: {names}")


def _known_numels(rule: Rule, member: Member) -> dict[str, int]:
    """The number of elements of all that a parameter's state may have, by key."""
    numel = member.param.numel()
    found = {STEP: 1} | {spec.key: 1 for spec in rule.numbers}
    shapes = {spec.key: rule.shape_of(spec, member.param.shape) for spec in rule.states}
    found |= {key: math.prod(shape) for key, shape in shapes.items() if shape is not None}
    found |= {spec.key: numel for spec in (*MASTERS, MASK)}
    return found | {spec.key + SCALE: num_blocks(numel) for spec in rule.states}


def _specs(rule: Rule) -> dict[str, StateSpec]:
    """Of what is kept for each element."""
    return {spec.key: spec for spec in (*rule.states, *MASTERS, MASK)}


def _tensor(value: Any) -> Tensor:
    """Some classes keep Python's numbers, as old versions of torch did."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def _check_whole(rule: Rule, member: Member, state: Mapping[str, Any]) -> None:
    known, specs = _known_numels(rule, member), _specs(rule)
    if rule.on_host and (foreign := [key for key, value in state.items() if value is not None and key not in known]):
        raise ValueError(
            f"state of parameter {member.quoted} has {foreign[0]!r}, which {rule.name} does not keep under the options "
            f"that were loaded with it: it keeps {', '.join(known)}"
        )
    for key, numel in known.items():
        if state.get(key) is None:
            continue
        if (found := _tensor(state[key]).numel()) != numel:
            raise ValueError(f"state of parameter {member.quoted} has {found} elements of {key} instead of {numel}")
        value = state[key]
        is_part = isinstance(value, SlicedTensor) and value.dim() > 0 and not key.endswith(SCALE)
        shape = rule.shape_of(specs[key], member.local.shape) if key in specs else member.local.shape
        if is_part and (value.cut, value.part[0]) != (member.cut, shape):
            raise ValueError(f"state of parameter {member.quoted} is of another cut: zerox.load() takes any")
        if key in specs and key + SCALE not in state and form_of(specs[key], _tensor(value).dtype).scaled:
            raise ValueError(f"state of parameter {member.quoted} has no {key + SCALE} beside its {key} of 8 bits")


def _check_mask(bucket: Bucket, member: Member, state: Mapping[str, Any]) -> None:
    """A mask that is not taken would let its zeros train, and one that is not given is not that of these values."""
    masked = bucket.mask is not None and any(bucket.members[slot] is member for slot in bucket.mask.slots)
    if masked and state and state.get(MASK.key) is None:
        raise ValueError(
            f"state of parameter {member.quoted} has no mask, and the optimizer has a zerox.Sparsity for it: load "
            "first, and build the Sparsity then"
        )
    if not masked and state.get(MASK.key) is not None:
        raise ValueError(
            f"state of parameter {member.quoted} has a mask: build a zerox.Sparsity for it before loading, or take "
            '"mask" out of the state, and let its zeros train'
        )


def _parts(bucket: Bucket, slot: int, state: Mapping[str, Any], span: Span) -> dict[str, Tensor]:
    """The parts of ``state`` for these elements of a parameter, 1-D. ValueError if it is the share of another rank."""
    rule, member = bucket.rule, bucket.members[slot]
    shape = tuple(bucket.buffer.shapes[slot])
    lies = shape, bucket.buffer.strides[slot]  # the parameter itself may lie anywhere by now
    found, specs = {}, _specs(rule)
    numbers = {STEP, *(spec.key for spec in rule.numbers)}
    if cuts_of(member.param):
        state = _cut(rule, member, state)
    for key in _known_numels(rule, member):
        if state.get(key) is not None:
            scales = key.endswith(SCALE)
            value = _tensor(state[key])
            own = rule.shape_of(specs[key], shape) if key in specs else shape
            if own is not None and own != shape:
                # This rank has a segment of the parameter, and so all of it: it lies whole on one.
                found[key] = _part(member, key, value, Span(0, math.prod(own)), (own, row_major(own)), False)
                continue
            wanted = WHOLE_NUMBER if key in numbers else blocks_of(span) if scales else span
            is_shaped = not scales and key not in numbers
            is_coded = key in specs and form_of(specs[key], value.dtype).scaled
            found[key] = _part(member, key, value, wanted, lies if is_shaped else None, is_coded)
    if found and STEP not in found and not rule.keeps_step:
        found[STEP] = torch.ones(1, dtype=torch.int64, device="cpu")
    return found


def _cut(rule: Rule, member: Member, state: Mapping[str, Any]) -> dict[str, Any]:
    """What whole tensors of a DTensor's state are for the local tensor; parts that were cut already stay."""
    found = dict(state)
    for spec in (*rule.states, *MASTERS):
        value = state.get(spec.key)
        if isinstance(value, Tensor) and not isinstance(value, SlicedTensor):
            whole = value.detach().reshape(member.param.shape)
            if (scales := found.pop(spec.key + SCALE, None)) is not None:
                codes = whole.as_strided((whole.numel(),), (1,))
                whole = decode(Stored.given(spec, codes, scales)).as_strided(whole.shape, whole.stride())
            found[spec.key] = part_of(member.param, whole)
    return found


def _part(
    member: Member, key: str, value: Tensor, span: Span, lies: tuple[Shape, Shape] | None, is_coded: bool
) -> Tensor:
    """``lies``: the shape and strides of the whole, if it has them. ``is_coded``: in blocks."""
    if isinstance(value, SlicedTensor):
        if span.numel and not (value.start <= span.start and span.stop <= value.span.stop):
            raise ValueError(
                f"state of parameter {member.quoted} is another rank's share or was saved at another world size: of "
                f"its {key} it has elements {value.start} to {value.span.stop}, and this rank needs {span.start} to "
                f"{span.stop}. {OF_ONE_RANK}"
            )
        if lies is not None and value.part[1] != lies[1]:
            raise ValueError(_other_format(member))
        return value.own[max(0, span.start - value.start) :][: span.numel]
    value = value.detach()
    if lies is not None:
        value = value.reshape(lies[0])
        if value.stride() != lies[1]:
            if is_coded:  # its blocks are of other elements
                raise ValueError(_other_format(member))
            value = torch.empty_strided(*lies, dtype=value.dtype, device=value.device).copy_(value)
        value = value.as_strided((value.numel(),), (1,))
    return value.reshape(-1)[span.start : span.stop]


def _other_format(member: Member) -> str:
    return (
        f"state of parameter {member.quoted} is of a parameter in another memory format: zerox.load() and "
        "full_state_dict() are for any"
    )


def parts_given(bucket: Bucket, slot: int, state: Mapping[str, Any], span: Span) -> dict[str, Tensor]:
    """The parts of some of a parameter's state for these elements, 1-D. ValueError for what does not fit."""
    _check_whole(bucket.rule, bucket.members[slot], state)
    return _parts(bucket, slot, state, span)
