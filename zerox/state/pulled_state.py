"""State that other ranks have, read where it lies: Note [State is pulled] in csrc/peers/published_state.h."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zerox import _C as C
from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket, Member
from zerox.memory.forms import decode, master_of
from zerox.memory.mask import Mask, unpack_bits
from zerox.memory.pages import in_large_pages
from zerox.memory.state_layout import NOWHERE, StateLayout
from zerox.memory.stored import SCALE, Stored
from zerox.optimizer.core import Core
from zerox.plan.form import BLOCK_NUMEL, num_blocks
from zerox.plan.layout import Segment
from zerox.plan.span import Span
from zerox.ranks.dtensors import cuts_of
from zerox.ranks.group import CPU
from zerox.rules.rule import MASK, MASTER, MASTERS, REMAINDER, STEP, NumberSpec
from zerox.state.full_state import show_in_group
from zerox.state.live_tensor import Live, LiveTensor
from zerox.state.pulled_tensor import PulledTensor
from zerox.state.shown_state import ShownState
from zerox.state.sliced_state import is_shown
from zerox.state.state_changes import ABSENT, PARAMS, Changing, Params, Places, Window, sharded

PATIENCE_S = 10.0
T = TypeVar("T")
NOTHING: AbstractContextManager[None] = nullcontext()
CHANGED = (
    "zerox: this is the state before a later step(), load_state_dict() or write to optimizer.state (or, with masters "
    "of 16-bit parameters that are sharded, before these were written), and what rank {} had of it is gone: save a "
    "state_dict() before that, or take the whole of it with full_state_dict() on all ranks"
)
GONE = "zerox: the optimizer of this state is gone, and with it what other ranks had of it"
MOVED = (
    "zerox: parameter {} was given other memory, and its shards do not have its values yet: call "
    "optimizer.synchronize() on all ranks before one of them reads the whole state"
)
WRITTEN = (
    "zerox: optimizer.state was written, and the other ranks do not know of it yet: call optimizer.synchronize() on "
    "all ranks before one of them reads the whole state"
)


IN_GRAPH = (
    "zerox: a CUDA graph replays step(), which other ranks do not see, so no rank reads state alone: call "
    "full_state_dict() on all ranks"
)


class Owner(NamedTuple):
    """A rank that has ``segment`` of a parameter, its ``row``-th."""

    rank: int
    row: int
    segment: Segment


class PulledState:
    """Of all ranks of an optimizer. Phases: "pulls"."""

    def __init__(self, core: Core, shows: ShownState, window: Window | None) -> None:
        self.core = core
        self.shows = shows
        self.window = window
        self.params, self.places = Params(), Places(core)
        self.of_all = self.of_step = self.load = NOTHING
        if window is not None:
            self.of_all = Changing(window.own, self.places, self.params, C.StateChange.OF_ALL)
            self.of_step = Changing(window.own, self.places, self.params, C.StateChange.STEP)
            self.load = Changing(window.own, self.places, self.params, C.StateChange.LOAD)
        self.is_in_graph = False  # step(), which a CUDA graph replays
        self._owners: dict[int, list[list[Owner]]] = {}  # by bucket and slot
        core.phases.before_sync("pulls", self._await)

    def step(self, capturing: bool) -> AbstractContextManager[None]:
        """Around the changes of a step(). Nobody sees those of a graph that is replayed."""
        return self._captured() if capturing else self.of_step

    @contextmanager
    def _captured(self) -> Iterator[None]:
        yield
        self.is_in_graph = True

    def begin_step(self) -> None:
        """Parameters are about to change."""
        self.params.updating = threading.get_ident()

    def end_step(self) -> None:
        """They have come from all ranks, or an operator that reads one waits for it; or were loaded."""
        self.params.updating = 0

    def break_off(self, version: int) -> None:
        """A load has failed here, before which there was this version: nobody reads this rank's state before another
        one succeeds."""
        if self.window is not None:
            is_counted = self.version != version
            self.window.own.begin_change()
            what = C.StateChange.OF_THIS_RANK if is_counted else C.StateChange.LOAD
            self.window.own.end_change(what, is_whole=False, tensors=None)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around what this rank changes alone: nobody reads its state before all ranks agree, or load one."""
        if self.window is None:
            yield
            return
        self.window.own.begin_change()
        try:
            yield
        finally:
            self.window.own.end_change(C.StateChange.OF_THIS_RANK, is_whole=False, tensors=self.places.look())

    @property
    def version(self) -> int:
        return 0 if self.window is None else self.window.own.version

    def _await(self, _: Visit) -> None:
        if self.window is not None:
            self.window.peers.await_pulls()

    @property
    def is_complete(self) -> bool:
        """Whether all state of parameters that ranks share can be pulled now."""
        return self.can_be_complete and not self.is_in_graph

    @property
    def can_be_complete(self) -> bool:
        """The same, but for CUDA graphs that replay step()."""
        core = self.core
        if self.window is None or core.tables:
            return False
        is_cut = any(cuts_of(member.param) for bucket in core.buckets for member in bucket.members)
        return not (is_cut or core.grads.subgroups.are_many)

    def shown(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """Each parameter's state in the form of full_state_dict(), but for state that has not begun: see begun()."""
        for index, bucket in enumerate(self.core.buckets):
            rows = {segment.slot: (row, segment) for row, segment in enumerate(bucket.own_segments)}
            for slot, member in enumerate(bucket.members):
                row, own = rows.get(slot, (-1, NOWHERE))
                shown: dict[str, Any] = {}
                for spec in (bucket.rule.step, *bucket.rule.numbers):
                    shown[spec.key] = self._shown_number(index, slot, row, spec)
                for stored in bucket.state.values():
                    if (row, stored.spec.key) not in bucket.absent and is_shown(bucket, stored, slot):
                        shown[_key_of(stored)] = self._shown_tensor(index, slot, row, stored)
                if bucket.mask is not None and slot in bucket.mask.slots:
                    shown[MASK.key] = self._shown_mask(index, slot, own, bucket.mask)
                yield member, shown

    def live(self, index: int, slot: int, row: int) -> dict[str, Any]:
        """The same for ``optimizer.state``, of one parameter of a bucket, as it is whenever somebody looks. Without
        masks, which nobody writes there. ``row``: this rank's, or -1."""
        bucket, live, place = self.core.buckets[index], dict[str, Any](), (index, slot)
        note = self.shows.state.in_place.append
        for spec in (bucket.rule.step, *bucket.rule.numbers):
            number, dtype = bucket.numbers[spec.key][max(row, 0) : row + 1], getattr(torch, spec.dtype)
            pull = self._later_now(PulledState._number, index, slot, spec.key)
            shown = Live(place, partial(number.to, dtype), pull, note)
            live[spec.key] = LiveTensor((), (), Span(0, number.numel()), shown, dtype, number.device)
        for key, stored in bucket.state.items():
            if not is_shown(bucket, stored, slot):
                continue
            part, lies = bucket.part_of(stored, row), bucket.layout_of(stored)
            shape, strides, span = lies.shapes[slot] or (), lies.strides[slot], lies.segment(row).of_param
            wide = partial(_same, part.values) if part.is_wide else partial(_stored, weakref.ref(bucket), row, part)
            pull = self._later_now(PulledState._tensor, index, slot, key)
            shown = Live(place, wide, pull, None if stored.spec in MASTERS else note)
            live[_key_of(stored)] = LiveTensor(shape, strides, span, shown, part.wide, part.values.device)
        return live

    def begun(self) -> dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        """Of classes of torch's kind what is pickled of each parameter's state, by its number: see BegunState."""
        found: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}
        for index, bucket in enumerate(self.core.buckets):
            if bucket.rule.on_host:
                begun = functools.cache(self._later(PulledState._begun, index))
                found |= {m.number: partial(_begun_of, begun, m, slot) for slot, m in enumerate(bucket.members)}
        return found

    def _shown_number(self, index: int, slot: int, row: int, spec: NumberSpec) -> PulledTensor:
        number = self.core.buckets[index].numbers[spec.key][max(row, 0) : row + 1].clone()
        pull = self._later(PulledState._number, index, slot, spec.key)
        return PulledTensor((), (), Span(0, number.numel()), number, pull, number.dtype, number.device)

    def _shown_tensor(self, index: int, slot: int, row: int, stored: Stored) -> PulledTensor:
        bucket = self.core.buckets[index]
        part, lies = bucket.part_of(stored, row), bucket.layout_of(stored)
        shape, strides, span = lies.shapes[slot] or (), lies.strides[slot], lies.segment(row).of_param
        params = bucket.param_of(row) if stored.spec == REMAINDER and row >= 0 else None
        values = part.values if part.is_wide else partial(_widen, part, params)
        pull = self._later(PulledState._tensor, index, slot, stored.spec.key)
        shown = PulledTensor(shape, strides, span, values, pull, part.wide, part.values.device)
        if part.spec == REMAINDER:
            shown.int16 = part.values
        return shown

    def _shown_mask(self, index: int, slot: int, own: Segment, mask: Mask) -> PulledTensor:
        buffer = self.core.buckets[index].buffer
        kept = partial(mask.kept, own.span.start, own.span.stop)
        pull = self._later(PulledState._mask, index, slot)
        shape, strides = buffer.shapes[slot], buffer.strides[slot]
        return PulledTensor(shape, strides, own.of_param, kept, pull, torch.bool, mask.bits.device)

    def _later(self, method: Callable[..., T], *what: Any) -> Callable[[], T]:
        """A read of the state that there is now, by whoever asks for it later."""
        return partial(_pull, weakref.ref(self), self.version, method, *what)

    def _later_now(self, method: Callable[..., T], *what: Any) -> Callable[[], Callable[[], T]]:
        """Makes a read of the state that there is then."""
        return partial(_bound, weakref.ref(self), method, *what)

    # ---- pulls

    def _number(self, version: int, index: int, slot: int, key: str) -> Tensor:
        number = torch.zeros(1, dtype=self.core.buckets[index].numbers[key].dtype, device=CPU)
        for owner in self._owners_of(index, slot)[:1]:
            self._read(owner.rank, version, index, key, owner.row, number)
        return number.reshape(())

    def _begun(self, version: int, index: int) -> Begun:
        """What a bucket's parameters have of state that begins with an update."""
        bucket, keys = self.core.buckets[index], list(self.core.buckets[index].state)
        found = Begun(bucket, self.core.groups.param_groups)
        for rank in range(self.core.ranks.size):
            slots = [segment.slot for segment in bucket.plan.layout.segments(self.core.ranks.shard_of(rank))]
            for spec in (bucket.rule.step, *bucket.rule.numbers):
                numbers = _empty_as(bucket.numbers[spec.key], len(slots))
                self._read(rank, version, index, spec.key, 0, numbers)
                for slot, number in zip(slots, numbers, strict=True):
                    found.numbers.setdefault((slot, spec.key), spec.show(number.clone()))
            flags = torch.empty(len(slots) * len(keys), dtype=torch.uint8, device=CPU)
            self._read(rank, version, index, ABSENT, 0, flags)
            of_flags = [(slot, key) for slot in slots for key in keys]
            found.absent |= {each for each, flag in zip(of_flags, flags.tolist(), strict=True) if flag}
        return found

    def _mask(self, version: int, index: int, slot: int) -> Tensor:
        bucket = self.core.buckets[index]
        whole = torch.empty_strided(
            bucket.buffer.shapes[slot], bucket.buffer.strides[slot], dtype=torch.bool, device=CPU
        )
        flat = whole.as_strided((whole.numel(),), (1,))
        for owner in self._owners_of(index, slot):
            own = owner.segment.span
            bits = torch.empty(-(-own.stop // 8) - own.start // 8, dtype=torch.uint8, device=CPU)
            self._read(owner.rank, version, index, MASK.key, own.start // 8, bits)
            start = owner.segment.param_start
            flat[start : start + own.numel] = unpack_bits(bits, own.stop - own.start // 8 * 8)[own.start % 8 :]
        return whole

    def _tensor(self, version: int, index: int, slot: int, key: str) -> Tensor:
        bucket = self.core.buckets[index]
        stored = bucket.state[key]
        lies = bucket.layout_of(stored)
        shape, strides = lies.shapes[slot] or (), lies.strides[slot]
        whole = in_large_pages(torch.empty_strided(shape, strides, dtype=stored.wide, device=CPU))
        flat = whole.as_strided((whole.numel(),), (1,))
        is_wide = stored.is_wide
        is_remainder = stored.spec == REMAINDER
        number = self._await_params(version) if is_remainder else 0
        params = self._own_params(index, slot) if is_remainder and sharded(self.core.gather) is None else None
        for owner in self._owners_of(index, slot):
            segment = owner.segment if stored.layout is None else self._segment_of(owner, lies)
            own, span = segment.span, segment.of_param
            into = flat[span.start : span.stop]
            values = into if is_wide else _empty_as(stored.values, own.numel)
            self._read(owner.rank, version, index, key, own.start, values)
            scales = None
            if stored.scales is not None:
                first = own.start // BLOCK_NUMEL
                scales = _empty_as(stored.scales, num_blocks(own.stop) - first)
                self._read(owner.rank, version, index, key + SCALE, first, scales)
            if not is_wide:
                theirs = None if params is None else params[span.start : span.stop]
                if is_remainder and params is None:
                    theirs = self._params(version, index, slot, owner)
                into.copy_(_widen(Stored(stored.spec, stored.form, values, scales), theirs))
        if params is not None and (self.params.are_changing or self.params.number != number):
            raise RuntimeError(CHANGED.format(self.core.ranks.rank))
        return whole

    def _await_params(self, version: int) -> int:
        """The number of this rank's parameters. On a thread beside the training they may be on their way in step(); on
        that of the training step() has ended, by Ctrl-C."""
        if self.params.updating == threading.get_ident():
            self.core.gather.wait()
            self.end_step()
        deadline = time.monotonic() + PATIENCE_S
        while self.params.are_changing and self.version == version and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.params.number

    def _own_params(self, index: int, slot: int) -> Tensor:
        """A parameter 1-D, of which masters are made: this rank's own copy, as its script sees it now. An owner's
        script may be elsewhere, and have swapped in an average of weights."""
        buffer = self.core.buckets[index].buffer
        param = buffer.home(slot) if buffer.misfit(slot, "") else buffer.params[slot].detach()
        return buffer.in_order(slot, param).to(CPU)

    def _params(self, version: int, index: int, slot: int, owner: Owner) -> Tensor:
        """The owner's part of a sharded parameter."""
        bucket, own = self.core.buckets[index], owner.segment
        if not bucket.buffer.misfit(slot, "") and not bucket.buffer.is_at_home(slot):
            raise RuntimeError(MOVED.format(bucket.members[slot].quoted))
        values = _empty_as(bucket.param_shard, own.span.numel)
        self._read(owner.rank, version, index, PARAMS, own.span.start, values)
        return values

    def _owners_of(self, index: int, slot: int) -> list[Owner]:
        if index not in self._owners:
            bucket, ranks = self.core.buckets[index], self.core.ranks
            found: list[list[Owner]] = [[] for _ in bucket.members]
            for rank in range(ranks.size):
                for row, segment in enumerate(bucket.plan.layout.segments(ranks.shard_of(rank))):
                    found[segment.slot].append(Owner(rank, row, segment))
            self._owners[index] = found
        return self._owners[index][slot]

    def _segment_of(self, owner: Owner, lies: StateLayout) -> Segment:
        """What it has of state that lies by itself."""
        return lies.layout.segments(self.core.ranks.shard_of(owner.rank))[owner.row]

    def _read(self, rank: int, version: int, index: int, key: str, start: int, into: Tensor) -> None:
        """Elements from ``start`` on of what a rank has of a bucket under this key, into the host's memory."""
        assert self.window is not None
        if into.numel() == 0:
            return
        places, count = self.places.of_buckets
        if index >= len(places) or key not in places[index]:  # of later state
            raise RuntimeError(CHANGED.format(rank))
        is_read = self.window.peers.read(
            rank=rank,
            version=version,
            num_places=count,
            place=places[index][key],
            start=start * into.element_size(),
            into=into,
        )
        if not is_read:
            raise RuntimeError(CHANGED.format(rank))


@dataclass
class Begun:
    """Of a bucket whose rule is a class of torch's: all parameters' ``numbers``, by slot and key, and what is
    ``absent``."""

    bucket: Bucket
    groups: Sequence[Mapping[str, Any]]
    numbers: dict[tuple[int, str], Any] = field(default_factory=dict)
    absent: set[tuple[int, str]] = field(default_factory=set)

    def of(self, member: Member, slot: int, shown: Mapping[str, Any]) -> dict[str, Any]:
        """What there is of a parameter's state, of which ``shown`` has the tensors."""
        rule, group = self.bucket.rule, self.groups[member.group]
        there = {key: value for key, value in shown.items() if (slot, key) not in self.absent}
        there |= {key: self.numbers[slot, key] for key in shown if (slot, key) in self.numbers}
        if rule.knows(group):
            return show_in_group(rule, group, there)
        return there if there[STEP.key] else {}


def _begun_of(begun: Callable[[], Begun], member: Member, slot: int, shown: Mapping[str, Any]) -> dict[str, Any]:
    return begun().of(member, slot, shown)


def _pull(to_state: weakref.ref[PulledState], version: int, method: Callable[..., T], *what: Any) -> T:
    state = to_state()
    if state is None or state.window is None or not hasattr(state.core, "loading"):
        raise RuntimeError(GONE)
    state.core.ranks.check_here()
    if failed := state.core.loading.failed:
        raise RuntimeError(
            f"zerox: this rank's load_state_dict() raised, so it has another state than the others: {failed}"
        )
    if any(state.shows.written.values()):
        raise RuntimeError(WRITTEN)
    if state.is_in_graph:
        raise RuntimeError(IN_GRAPH)
    state.window.own.follow_change()  # what reads this rank's own parameters
    with C.Doing("a read of optimizer state"), C.StatePull(state.window.peers), torch.no_grad():
        return method(state, version, *what)


def _key_of(stored: Stored) -> str:
    """As full_state_dict() has it."""
    return MASTER.key if stored.spec == REMAINDER else stored.spec.key


def _same(values: Tensor) -> Tensor:
    return values


def _stored(to_bucket: weakref.ref[Bucket], row: int, part: Stored) -> Tensor:
    bucket = to_bucket()
    if bucket is None:
        raise RuntimeError(GONE)
    return _widen(part, bucket.param_of(row) if part.spec == REMAINDER and row >= 0 else None)


def _bound(to_state: weakref.ref[PulledState], method: Callable[..., T], *what: Any) -> Callable[[], T]:
    state = to_state()
    if state is None:
        raise RuntimeError(GONE)
    return state._later(method, *what)


def _empty_as(values: Tensor, numel: int) -> Tensor:
    return torch.empty(numel, dtype=values.dtype, device=CPU)


def _widen(part: Stored, params: Tensor | None) -> Tensor:
    """Float32 or float64; a remainder with the parameter's values."""
    if part.spec == REMAINDER:
        return master_of(part.values.new_empty(0, dtype=torch.bfloat16) if params is None else params, part.values)
    return decode(part).to(part.wide)
