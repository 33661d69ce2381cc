"""State that other ranks have, read where it lies: Note [State is pulled] in csrc/peers/published_state.h."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox import _C as C
from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket, Member
from zerox.memory.forms import decode, master_of
from zerox.memory.pages import in_large_pages
from zerox.memory.stored import Stored
from zerox.optimizer.core import Core
from zerox.params.params import ParamGather
from zerox.plan.form import BLOCK_NUMEL, num_blocks
from zerox.plan.layout import Segment
from zerox.plan.span import Span
from zerox.ranks.dtensors import cuts_of
from zerox.ranks.group import Ranks
from zerox.ranks.neighbours import is_state_pulled
from zerox.residency.residency import Residency
from zerox.rules.rule import MASTER, REMAINDER, NumberSpec
from zerox.state.pulled_tensor import PulledTensor
from zerox.state.shown_state import ShownState

PATIENCE_S = 10.0
CPU = torch.device("cpu")
NOTHING: AbstractContextManager[None] = nullcontext()
CHANGED = (
    "zerox: this is the state before a later step() or load_state_dict() (or, with masters of 16-bit parameters that "
    "are sharded, before these were written), and what rank {} had of it is gone: save a state_dict() before that, or "
    "take the whole of it with full_state_dict() on all ranks"
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


class Window(NamedTuple):
    """``own``: this rank's state, for the others; ``peers``: that of all."""

    own: C.PublishedState
    peers: C.PeerStates


def open_window(ranks: Ranks) -> Window | None:
    """None if not all ranks can read this one's state, or the user wants none of it. Collective."""
    linger, questions = ranks.neighbours.linger, ranks.neighbours.questions
    if ranks.failure_detector is None or linger is None or not is_state_pulled():
        return None
    own = C.PublishedState()
    others: C.StateSource
    if questions is None:
        control_blocks = [int(each) for each in ranks.all_gather_text(str(own.address))]
        others = C.StatesInMemory(ranks.neighbours.processes, control_blocks)
    else:
        questions.server.serve(own)
        others = questions.asked
    return Window(own, C.PeerStates(own=own, failure_detector=ranks.failure_detector, linger=linger, others=others))


class Params:
    """What all Changing of a rank share: when its parameters change, of which masters are made. What was copied of them
    is of one state if no change was open before, and ``number`` is the same afterwards."""

    def __init__(self) -> None:
        self.number = 0
        self.num_open = 0
        self.updating = 0  # the thread in step(), until all have come from their owners
        self.published: list[object] = []  # the objects in which the state lay when its tensors were last published

    def begin(self) -> None:
        self.number += 1
        self.num_open += 1

    def end(self) -> None:
        self.num_open -= 1

    @property
    def are_changing(self) -> bool:
        return bool(self.num_open or self.updating)


class Changing:
    """Around what changes state on this rank: nobody reads it meanwhile, and what was read before is of an older
    version, unless this rank changes it alone."""

    def __init__(self, own: C.PublishedState, core: Core, params: Params, what: C.StateChange) -> None:
        self.own = own
        self.params = params
        self.buckets = core.buckets
        self.gather = core.gather
        self.what = what

    def __enter__(self) -> None:
        if self.what != C.StateChange.OF_THIS_RANK:
            self.params.begin()
        self.own.begin_change()

    def __exit__(self, kind: object, *_: object) -> None:
        now: list[object] = []
        for bucket in self.buckets:
            now += (bucket.state, len(bucket.numbers), bucket.param_shard)
        tensors = None
        if not C.has_same_objects(now, self.params.published):
            self.params.published = now
            tensors = [tensor for bucket in self.buckets for tensor in _tensors_of(bucket)]
            residents = _sharded(self.gather)
            if residents is not None and any(REMAINDER.key in bucket.state for bucket in self.buckets):
                residents.set_state(self.own)
        self.own.end_change(self.what, kind is None, tensors)
        if self.what != C.StateChange.OF_THIS_RANK:
            self.params.end()


def _sharded(gather: ParamGather | Residency) -> C.Residency | None:
    """The parameters, if they are sharded, and not whole for good since unshard()."""
    return gather.residents if isinstance(gather, Residency) and gather.residents.has_shards else None


def _tensors_of(bucket: Bucket) -> Iterator[Tensor]:
    """In which a bucket's state lies on this rank: each state with its scales, if it has some, the numbers, and the
    parameters."""
    for stored in bucket.state.values():
        yield stored.values
        yield stored.values if stored.scales is None else stored.scales
    yield from bucket.numbers.values()
    yield bucket.param_shard


def _num_tensors(bucket: Bucket) -> int:
    return 2 * len(bucket.state) + len(bucket.numbers) + 1


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
        self.params = Params()
        self.of_all = self.of_this_rank = self.of_step = self.load = NOTHING
        if window is not None:
            self.of_all = Changing(window.own, core, self.params, C.StateChange.OF_ALL)
            self.of_this_rank = Changing(window.own, core, self.params, C.StateChange.OF_THIS_RANK)
            self.of_step = Changing(window.own, core, self.params, C.StateChange.STEP)
            self.load = Changing(window.own, core, self.params, C.StateChange.LOAD)
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

    @property
    def version(self) -> int:
        return 0 if self.window is None else self.window.own.version

    def _await(self, _: Visit) -> None:
        if self.window is not None:
            self.window.peers.await_pulls()

    @property
    def is_complete(self) -> bool:
        """Whether all of the state can be pulled."""
        core = self.core
        if (
            self.window is None
            or self.is_in_graph
            or core.tables
            or core.grads.subgroups.are_many
            or core.calls.own.are_some
        ):
            return False
        return not any(map(self._has_more, core.buckets))

    def _has_more(self, bucket: Bucket) -> bool:
        """Whether a bucket has state that is not in its tensors alone."""
        is_cut = any(cuts_of(member.param) for member in bucket.members)
        return is_cut or bucket.rule.on_host or bucket.mask is not None

    def shown(self) -> Iterator[tuple[Member, dict[str, PulledTensor]]]:
        """Each parameter's state in the form of full_state_dict()."""
        assert self.window is not None
        for index, bucket in enumerate(self.core.buckets):
            rows = {segment.slot: (row, segment) for row, segment in enumerate(bucket.own_segments)}
            for slot, member in enumerate(bucket.members):
                row, own = rows.get(slot, (-1, Segment(-1, Span(0, 0), 0)))
                pulls = partial(partial, _pull, weakref.ref(self), self.version)
                shown = {}
                for spec in (bucket.rule.step, *bucket.rule.numbers):
                    number = bucket.numbers[spec.key][max(row, 0) : row + 1].clone()
                    pull = pulls(PulledState._number, index, slot, spec)
                    shown[spec.key] = PulledTensor(
                        (), (), Span(0, number.numel()), number, pull, number.dtype, number.device
                    )
                for stored in bucket.state.values():
                    key = MASTER.key if stored.spec == REMAINDER else stored.spec.key
                    span = Span(own.param_start, own.param_start + own.span.numel)
                    part = stored.part(slice(own.span.start, own.span.stop))
                    params = bucket.param_of(row) if part.spec == REMAINDER and row >= 0 else None
                    values = part.values if _is_wide(part) else partial(_widen, part, params)
                    pull = pulls(PulledState._tensor, index, slot, stored.spec.key)
                    shape, strides = bucket.buffer.shapes[slot], bucket.buffer.strides[slot]
                    shown[key] = PulledTensor(shape, strides, span, values, pull, _wide(part), part.values.device)
                    if part.spec == REMAINDER:
                        shown[key].int16 = part.values
                yield member, shown

    # ---- pulls

    def _number(self, version: int, index: int, slot: int, spec: NumberSpec) -> Tensor:
        bucket = self.core.buckets[index]
        number = torch.zeros(1, dtype=bucket.numbers[spec.key].dtype, device=CPU)
        place = 2 * len(bucket.state) + list(bucket.numbers).index(spec.key)
        for owner in self._owners_of(index, slot)[:1]:
            self._read(owner.rank, version, index, place, owner.row, number)
        return number.reshape(())

    def _tensor(self, version: int, index: int, slot: int, key: str) -> Tensor:
        bucket = self.core.buckets[index]
        stored, place = bucket.state[key], 2 * list(bucket.state).index(key)
        shape, strides = bucket.buffer.shapes[slot], bucket.buffer.strides[slot]
        whole = in_large_pages(torch.empty_strided(shape, strides, dtype=_wide(stored), device=CPU))
        flat = whole.as_strided((whole.numel(),), (1,))
        is_wide = _is_wide(stored)
        is_remainder = stored.spec == REMAINDER
        number = self._await_params(version) if is_remainder else 0
        params = self._own_params(index, slot) if is_remainder and _sharded(self.core.gather) is None else None
        for owner in self._owners_of(index, slot):
            own = owner.segment.span
            span = Span(owner.segment.param_start, owner.segment.param_start + own.numel)
            into = flat[span.start : span.stop]
            values = into if is_wide else _empty_as(stored.values, own.numel)
            self._read(owner.rank, version, index, place, own.start, values)
            scales = None
            if stored.scales is not None:
                first = own.start // BLOCK_NUMEL
                scales = _empty_as(stored.scales, num_blocks(own.stop) - first)
                self._read(owner.rank, version, index, place + 1, first, scales)
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
        self._read(owner.rank, version, index, _num_tensors(bucket) - 1, own.span.start, values)
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

    def _read(self, rank: int, version: int, index: int, place: int, start: int, into: Tensor) -> None:
        """Elements from ``start`` on of what a rank has at this place of a bucket, into the host's memory."""
        assert self.window is not None
        if into.numel() == 0:
            return
        first = list(accumulate(map(_num_tensors, self.core.buckets), initial=0))
        is_read = self.window.peers.read(
            rank=rank,
            version=version,
            num_places=first[-1],
            place=first[index] + place,
            start=start * into.element_size(),
            into=into,
        )
        if not is_read:
            raise RuntimeError(CHANGED.format(rank))


def _pull(to_state: weakref.ref[PulledState], version: int, method: Callable[..., Tensor], *what: Any) -> Tensor:
    state = to_state()
    if state is None or state.window is None or not hasattr(state.core, "loading"):
        raise RuntimeError(GONE)
    state.core.ranks.check_here()
    if failed := state.core.loading.failed:
        raise RuntimeError(
            f"zerox: this rank's load_state_dict() raised, so it has another state than the others: {failed}"
        )
    if state.shows.written:
        raise RuntimeError(WRITTEN)
    if state.is_in_graph:
        raise RuntimeError(IN_GRAPH)
    state.window.own.follow_change()  # what reads this rank's own parameters
    with C.Doing("a read of optimizer state"), C.StatePull(state.window.peers), torch.no_grad():
        return method(state, version, *what)


def _empty_as(values: Tensor, numel: int) -> Tensor:
    return torch.empty(numel, dtype=values.dtype, device=CPU)


def _widen(part: Stored, params: Tensor | None) -> Tensor:
    """Float32 or float64; a remainder with the parameter's values."""
    if part.spec == REMAINDER:
        return master_of(part.values.new_empty(0, dtype=torch.bfloat16) if params is None else params, part.values)
    return decode(part).to(_wide(part))


def _is_wide(stored: Stored) -> bool:
    return stored.values.dtype == _wide(stored)


def _wide(stored: Stored) -> torch.dtype:
    return torch.float64 if stored.values.dtype == torch.float64 else torch.float32
