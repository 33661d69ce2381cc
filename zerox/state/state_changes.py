"""What other ranks may read of this one's state, while nothing changes it: Note [State is pulled] in
csrc/peers/published_state.h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Bucket
from zerox.optimizer.core import Core
from zerox.params.params import ParamGather
from zerox.plan.environment import is_state_pulled
from zerox.ranks.group import CPU, Ranks
from zerox.residency.residency import Residency
from zerox.rules.rule import MASK, REMAINDER

# Places beside those of state, numbers and scales.
PARAMS, ABSENT = "the parameters", "what is absent"


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
    """When a rank's parameters change, of which masters are made. What was copied of them is of one state if no change
    was open before, and ``number`` is the same afterwards."""

    def __init__(self) -> None:
        self.number = 0
        self.num_open = 0
        self.updating = 0  # the thread in step(), until all have come from their owners

    def begin(self) -> None:
        self.number += 1
        self.num_open += 1

    def end(self) -> None:
        self.num_open -= 1

    @property
    def are_changing(self) -> bool:
        return bool(self.num_open or self.updating)


class Places:
    """Where the state lies on this rank, in an order that is the same on all: others ask for a place by its number."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.of_buckets: tuple[list[dict[str, int]], int] = [], 0  # by key; and how many there are
        self.absent: dict[int, Tensor] = {}  # flags by bucket, of those whose rule is a class of torch's
        self._absent_then: dict[int, tuple[int, set[tuple[int, str]]]] = {}  # of what they are
        self._objects: list[object] = []  # in which the state lay when it was last looked at

    def look(self) -> list[Tensor] | None:
        """The tensors; None if they are those of the last time."""
        buckets, now = self.core.buckets, list[object]()
        for index, bucket in enumerate(buckets):
            self._look_at_absent(index, bucket)
            now += (bucket.state, len(bucket.numbers), bucket.param_shard, bucket.mask, self.absent.get(index))
        if C.has_same_objects(now, self._objects):
            return None
        self._objects = now
        tensors: list[Tensor] = []
        places = []
        for index, bucket in enumerate(buckets):
            of_bucket = _tensors_of(bucket, self.absent.get(index))
            places.append({key: len(tensors) + place for place, key in enumerate(of_bucket)})
            tensors += of_bucket.values()
        self.of_buckets = places, len(tensors)
        return tensors

    def _look_at_absent(self, index: int, bucket: Bucket) -> None:
        """Others read a tensor, and this is a set: a flag for each row and state."""
        now = len(bucket.state), bucket.absent
        if not bucket.rule.on_host or self._absent_then.get(index) == now:
            return
        self._absent_then[index] = len(bucket.state), set(bucket.absent)
        rows = [(row, key) in bucket.absent for row in range(len(bucket.own_segments)) for key in bucket.state]
        flags = torch.tensor(rows, dtype=torch.uint8, device=CPU)
        if index in self.absent and self.absent[index].shape == flags.shape:
            self.absent[index].copy_(flags)
        else:
            self.absent[index] = flags


class Changing:
    """Around what changes state on this rank: nobody reads it meanwhile, and what was read before is of an older
    version, unless this rank changes it alone."""

    def __init__(self, own: C.PublishedState, places: Places, params: Params, what: C.StateChange) -> None:
        self.own = own
        self.places = places
        self.params = params
        self.what = what

    def __enter__(self) -> None:
        if self.what != C.StateChange.OF_THIS_RANK:
            self.params.begin()
        self.own.begin_change()

    def __exit__(self, kind: object, *_: object) -> None:
        tensors, core = self.places.look(), self.places.core
        if tensors is not None:
            residents = sharded(core.gather)
            if residents is not None and any(REMAINDER.key in bucket.state for bucket in core.buckets):
                residents.set_state(self.own)
        self.own.end_change(self.what, kind is None, tensors)
        if self.what != C.StateChange.OF_THIS_RANK:
            self.params.end()


def sharded(gather: ParamGather | Residency) -> C.Residency | None:
    """The parameters, if they are sharded, and not whole for good since unshard()."""
    return gather.residents if isinstance(gather, Residency) and gather.residents.has_shards else None


def _tensors_of(bucket: Bucket, absent: Tensor | None) -> dict[str, Tensor]:
    """In which a bucket's state lies on this rank, by key."""
    found: dict[str, Tensor] = {}
    for stored in bucket.state.values():
        found |= stored.tensors()
    found |= bucket.numbers
    found[PARAMS] = bucket.param_shard
    if absent is not None:
        found[ABSENT] = absent
    if bucket.mask is not None:
        found[MASK.key] = bucket.mask.bits
    return found
