"""Flat storage for the parameters of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.left_bucket import LeftBucket
from zerox.memory.pages import empty, zeros
from zerox.model_names import quote
from zerox.plan.layout import Layout
from zerox.plan.span import Span


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it has no gaps (channels-last, transposed), else dense ones."""
    # An operator on the parameter would read it.
    return torch.empty_like(torch.empty_strided(param.shape, param.stride(), device="meta")).stride()


def order_in_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides of dimensions of one element say nothing."""
    return [stride for stride, size in zip(strides, shape, strict=True) if size > 1]


def order_text(param: Tensor) -> str:
    """For what ranks compare, where it is not as usual: gradients are sent as their parameters lie."""
    strides = order_in_memory(param.shape, dense_strides(param))
    return "" if strides == sorted(strides, reverse=True) else f" with strides {strides}"


class FlatBuffer:
    """Memory ``[layout.numel]`` that a bucket's parameters lie in, side by side, each in a storage of its own.

    Only ``param.data`` changes: the parameters stay the objects that model and optimizer know. The buffer lives as long
    as one of them. Moving in takes memory for the bucket once more. ``flat``: memory that parameters move into later.
    """

    is_shared_out = False  # whether other ranks read the shard: it has values that are the same on all of them
    shard_is_apart = False  # no whole copy of the parameters lasts beside the shards (ZeRO stage 3)
    left: LeftBucket | None = None  # a deleted optimizer's, which has the values, the same on all ranks

    def __init__(self, params: Sequence[Tensor], layout: Layout, flat: Tensor | None = None) -> None:
        self.params = list(params)
        self.layout = layout
        self.shapes = [param.shape for param in params]
        self.strides = [dense_strides(param) for param in params]
        # Padding is sent with everything else: it should not be old memory.
        self.flat = zeros(layout.numel, params[0].dtype, params[0].device) if flat is None else flat
        if flat is None:
            take_in(self.slots(), values_of(self.slots()))

    @property
    def is_on_meta(self) -> bool:
        """Whether its parameters have no memory yet: all of a bucket or none."""
        return self.params[0].is_meta

    def slots(self) -> list[BufferSlot]:
        return [(self, slot) for slot in range(len(self.params))]

    def home(self, slot: int) -> Tensor:
        """The parameter's place, as a view of the buffer."""
        return self.flat.as_strided(self.shapes[slot], self.strides[slot], self.layout.offsets[slot])

    def own_home(self, slot: int) -> Tensor:
        """The same, in a storage of its own."""
        return C.with_own_storage(self.home(slot))

    def shard(self, rank: int) -> Tensor:
        span = self.layout.shard_span(rank)
        return self.flat[span.start : span.stop]

    def start(self) -> None:
        """The parameters have the values that are the same on all ranks."""

    def put(self, slot: int, value: Tensor) -> None:
        """Copies a parameter's value home."""
        self.home(slot).copy_(value)

    def is_at_home(self, slot: int) -> bool:
        param = self.params[slot]
        start = self.flat.data_ptr() + self.layout.offsets[slot] * self.flat.itemsize
        return C.address_of(param) == start and param.stride() == self.strides[slot]

    def in_order(self, slot: int, value: Tensor) -> Tensor:
        """A parameter's value 1-D, as the buffer has its elements."""
        in_order = torch.empty_strided(value.shape, self.strides[slot], dtype=value.dtype, device=value.device)
        return in_order.copy_(value).as_strided((value.numel(),), (1,))

    def misfit(self, slot: int, name: str) -> str:
        """Why a parameter that lies elsewhere (after .to(), .data =) can't be taken in; empty if it can."""
        param = self.params[slot]
        built = f"{tuple(self.shapes[slot])} of {self.flat.dtype} on {self.flat.device}"
        now = f"{tuple(param.shape)} of {param.dtype} on {param.device}"
        if built == now:
            return ""
        return (
            f"parameter {quote(name, param)} is {now}, but was {built} when the optimizer was built; build the "
            "optimizer after such a change"
        )


class ShardedBuffer(FlatBuffer):
    """A buffer whose memory comes and goes (csrc/residency/residents.h), and beside it what this rank keeps of it.

    ``own_shards``: the elements of that, this rank's shard and on a mesh those beside it. ``room``: the buffer's
    memory, or that of a deleted optimizer's bucket, ``left``. It is made without values: add_to() the residents,
    fill(), then start() or what else writes the shard, share_out().
    """

    shard_is_apart = True
    is_read_whole = True

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        own_shards: Span,
        room: C.Room,
        left: LeftBucket | None = None,
    ) -> None:
        self.own_segments = {segment.slot: segment for segment in layout.segments_in(own_shards)}
        self.is_shared_out = False  # until then the buffer keeps its memory
        self.room = room
        self.own_shards = own_shards
        self.left = left
        self.homes: list[Tensor] = []
        flat = room.tensor(params[0].dtype)
        self.own = left.shard if left else empty(own_shards.numel, flat.dtype, flat.device, place=1)
        super().__init__(params, layout, flat)
        places = zip(self.shapes, self.strides, layout.offsets, strict=True)
        self.homes = [C.view_unseen(self.flat, *place) for place in places]

    def home(self, slot: int) -> Tensor:
        return self.homes[slot] if self.homes else super().home(slot)

    def own_home(self, slot: int) -> Tensor:
        return self.room.with_own_storage(self.home(slot))

    def add_to(self, residents: C.Residency, name: str, is_served: bool) -> None:
        """``is_served``: whether a rank reads its shard in the host's memory."""
        if self.left is None:
            residents.add(name, self.room, self.own, self._starts(), is_served)
        else:
            residents.take(*self.left, name, self._starts(), is_served)

    def _starts(self) -> list[int]:
        """Where what each rank keeps begins, and the end of the last: on a mesh shards that lie together."""
        starts = self.layout.shard_starts
        together = starts.index(self.own_shards.stop) - starts.index(self.own_shards.start)
        return list(starts[::together])

    def fill(self, residents: C.Residency, index: int) -> None:
        """Takes in what this rank's parameters have. ``index``: of the bucket among the residents."""
        values = values_of(self.slots())  # first: they may lie in another bucket, which is fetched for it
        residents.begin_fill(index)
        take_in(self.slots(), values)

    def share_out(self, residents: C.Residency, index: int, by_rank: Sequence[C.ShardPlace]) -> None:
        """The shard has its values, and other ranks read it. The buffer's memory comes and goes from now on."""
        residents.end_fill(index, by_rank)
        self.is_shared_out = True

    def shard(self, rank: int) -> Tensor:
        span = self.layout.shard_span(rank)
        assert span.overlap(self.own_shards) == span, "only what this rank keeps is here"
        return self.own[span.start - self.own_shards.start : span.stop - self.own_shards.start]

    def start(self) -> None:
        """What is kept takes its part of them. What was ``left`` has it."""
        if not self.is_shared_out:
            self.keep_own()
        self.left = None

    def keep_own(self) -> None:
        """Takes this rank's part of the buffer's values."""
        self.own.copy_(self.flat[self.own_shards.start : self.own_shards.stop])

    def let_shard_go(self) -> None:
        """All is whole, for good."""
        self.own = self.flat[self.own_shards.start : self.own_shards.stop]

    def values(self, slot: int) -> Tensor:
        """The parameter's, side by side."""
        start = self.layout.offsets[slot]
        return self.flat[start : start + self.layout.numels[slot]]

    def own_span(self, slot: int) -> Span:
        """Which elements of the parameter, in memory order, this rank keeps."""
        own = self.own_segments.get(slot)
        return own.of_param if own else Span(0, 0)

    def own_values(self, slot: int) -> Tensor:
        """These, where they are kept."""
        own = self.own_segments.get(slot)
        return self.own[own.span.start : own.span.stop] if own else self.own[:0]

    def put(self, slot: int, value: Tensor) -> None:
        """Copies this rank's part where it is kept: once others read that, the buffer may have no memory."""
        if not self.is_shared_out:
            super().put(slot, value)
            return
        span = self.own_span(slot)
        self.own_values(slot).copy_(self.in_order(slot, value)[span.start : span.stop])


BufferSlot = tuple[FlatBuffer, int]


class Unfilled(NamedTuple):
    """``buffers`` whose parameters are on meta. To be called: begin() with the index of one that needs its memory,
    end() when it has all its values, the same on all ranks, and let_go() before something reads it after that."""

    buffers: Sequence[FlatBuffer]
    begin: Callable[[int], None]
    end: Callable[[int], None]
    let_go: Callable[[], None]


Materialize = Callable[[Unfilled], None]


def values_of(slots: Sequence[BufferSlot]) -> list[Tensor]:
    """The values of these parameters, which take_in() may overwrite where they lie.

    Two parameters may have been exchanged, or one transposed in place: then one's values lie in another's home.
    """
    params = [buffer.params[slot] for buffer, slot in slots]
    return [param.detach().clone() if C.has_own_storage(param) else param.detach() for param in params]


def take_in(slots: Sequence[BufferSlot], values: Sequence[Tensor]) -> None:
    """Copies these values home, and lets the parameters lie there.

    But a parameter in shared memory stays there, where other processes read it: see give_out().
    """
    for (buffer, slot), value in zip(slots, values, strict=True):
        param = buffer.params[slot]
        buffer.put(slot, value)
        if not in_shared_memory(param):
            param.data = buffer.own_home(slot)


def give_out(slots: Sequence[BufferSlot]) -> None:
    """Copies new values from home to those of these parameters that are in shared memory."""
    for buffer, slot in slots:
        if in_shared_memory(param := buffer.params[slot]):
            param.detach().copy_(buffer.home(slot))


def in_shared_memory(param: Tensor) -> bool:
    """Whether other processes may read it: after share_memory_(), or when it was sent to one."""
    return param.device.type == "cpu" and param.is_shared()
