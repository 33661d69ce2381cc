"""A whole tensor in ``optimizer.state``, of which this rank has a segment: as it is whenever it is looked at.

Note [Live state]
Scripts read the state and write it, on all ranks alike, and no rank knows how far the others are: `s.sub_(s.mean())`
is two things, and a rank that is late reads what another has written already. So a write goes into a copy of this
rank's segment, and the state takes it once ranks have synchronized, as it takes a tensor that was put into the dict
(shown_state.py). Until then others read the state as it was, and whoever reads what was written here gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerox import _torch
from zerox.plan.span import Span
from zerox.state.pulled_tensor import PulledTensor, holds, with_plain

SETS = _torch.overloads(
    *("zero_.default", "fill_.Scalar", "fill_.Tensor", "copy_.default", "masked_fill_.Scalar", "masked_fill_.Tensor")
)
IN_PART = (
    "zerox: {} writes a part of a tensor of optimizer.state, of which other ranks have some, or a copy of it, or "
    "changes its shape: write all of it, by optimizer.state[p][key] = TENSOR on all ranks, or call "
    "optimizer.set_full_state_()"
)
OF_MASTER = (
    "zerox: a master in optimizer.state is written in place, and the parameter's own value belongs to it: call "
    "optimizer.set_full_state_(p, master=...) on all ranks"
)
WAITS = (
    "zerox: a tensor of optimizer.state was written in place, and other ranks' parts of it may not be: call "
    "optimizer.synchronize() on all ranks before one of them reads it"
)
PLAIN = attrgetter("plain")


class Live:
    """What a tensor shows. ``place``: names its parameter. ``stored``: this rank's segment of the state, 1-D, as it is
    shown, now. ``pull``: makes what reads the whole tensor as it is now. ``note``: is told of the first write; None of
    a master, which can't be written. ``written``: what was written, and not taken yet."""

    def __init__(
        self,
        place: object,
        stored: Callable[[], Tensor],
        pull: Callable[[], Callable[[], Tensor]],
        note: Callable[[Live], object] | None,
    ) -> None:
        self.written: Tensor | None = None
        self.place, self.stored, self.pull, self.note = place, stored, pull, note

    def show_as(self, other: Live) -> None:
        """The same tensor of the same state, which lies elsewhere by now."""
        self.place, self.stored, self.pull, self.note = other.place, other.stored, other.pull, other.note

    def values(self) -> Tensor:
        return self.stored() if self.written is None else self.written

    def to_write(self) -> Tensor:
        if self.note is None:
            raise RuntimeError(OF_MASTER)
        if self.written is None:
            self.written = self.stored().clone()
            self.note(self)
        return self.written


class LiveTensor(PulledTensor):
    """Reading is as :class:`PulledTensor` has it, but of the state of this moment; ``detach`` gives the same again.
    What this rank has all of is read here.

    Operators that write each element by itself (``zero_``, ``copy_``, ``mul_``) write this rank's segment: see Note
    [Live state]. Others that write raise RuntimeError, as does what writes a view of it.
    """

    live: Live

    @staticmethod
    def __new__(  # type: ignore[misc]
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        span: Span,
        live: Live,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LiveTensor:
        made: LiveTensor = _torch.make_wrapper(cls, tuple(shape), tuple(strides), dtype=dtype, device=device)
        made.live, made.start, made.part, made.cut = live, span.start, (tuple(shape), tuple(strides)), None
        made.own_numel, made.int16, made.is_filled, made.is_being_filled = span.numel, None, False, False
        return made

    @property  # type: ignore[misc]
    def own(self) -> Tensor:  # type: ignore[override]
        return self.live.values()

    def _puller(self) -> Callable[[], Tensor]:
        return self.live.pull() if self.live.written is None else _wait

    @property  # type: ignore[misc]
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise RuntimeError(IN_PART.format("an assignment of .data"))
        self.copy_(values)

    def is_like(self, other: LiveTensor) -> bool:
        """Whether this one can show what the other does."""
        same = self.part == other.part and self.span == other.span
        return same and (self.dtype, self.device) == (other.dtype, other.device)

    def pulled(self) -> Tensor:
        if self.live.written is not None:
            _wait()
        if self.own_numel < self.numel():
            return super().pulled()
        return self.own.clone().as_strided(*self.part)

    def _on_host(self) -> Tensor:
        return super()._on_host() if self.own_numel < self.numel() else self.pulled().cpu()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            self = args[0]
            shape, strides = self.part
            return LiveTensor(shape, strides, self.span, self.live, self.dtype, self.device)
        written = _torch.written_by(func, args, kwargs)
        if not holds(LiveTensor, written):
            found = super().__torch_dispatch__(func, types, args, kwargs)
            return _protected(found, args) if _torch.returns_views(func) else found
        is_by_element = func in SETS or torch.Tag.pointwise in func.tags
        if len(written) > 1 or written[0] is not args[0] or not is_by_element:
            raise RuntimeError(IN_PART.format(func))
        self = args[0]
        if func is torch.ops.aten.copy_.default and isinstance(args[1], LiveTensor) and args[1].live is self.live:
            return self
        others = [self._segment(each) for each in args[1:]]
        func(self.live.to_write(), *others, **kwargs)
        return self

    def _segment(self, other: Any) -> Any:
        """Of what is combined with each element, what belongs to this rank's."""
        if not isinstance(other, Tensor) or (other.dim() == 0 and not isinstance(other, PulledTensor)):
            return other
        is_beside = not isinstance(other, LiveTensor) or other.live.place == self.live.place
        if isinstance(other, PulledTensor) and (other.part, other.span) == (self.part, self.span) and is_beside:
            return other.own
        whole = other.pulled() if isinstance(other, PulledTensor) else other
        shape, strides = self.part
        laid = torch.empty_strided(shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        return laid.as_strided((laid.numel(),), (1,))[self.start : self.span.stop]

    def share_memory_(self) -> LiveTensor:
        self.live.stored().share_memory_()
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        found = super().numpy(*args, **kwargs)
        found.flags.writeable = False
        return found

    def __setitem__(self, *_: Any) -> None:
        raise RuntimeError(IN_PART.format("an assignment"))

    def __create_chunk_list__(self) -> list[Any]:
        raise RuntimeError(IN_PART.format("torch.distributed.checkpoint"))


class Protected(Tensor):
    """A view of what was read: a write to it would be lost, and raises RuntimeError."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> Protected:
        made: Protected = _torch.make_wrapper(
            cls, tuple(plain.shape), plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if holds(Protected, _torch.written_by(func, args, kwargs)):
            raise RuntimeError(IN_PART.format(func))
        args, kwargs = (with_plain(Protected, each, PLAIN) for each in (args, kwargs))
        found = func(*args, **kwargs)
        return _protected(found, args) if _torch.returns_views(func) else found

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        found = self.plain.numpy(*args, **kwargs)
        found.flags.writeable = False
        return found

    def tolist(self) -> Any:
        return self.plain.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain)

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _wait() -> NoReturn:
    raise RuntimeError(WAITS)


def _protected(found: Any, args: Any) -> Any:
    """What an operator returns, but for arguments that it has written."""
    if isinstance(found, list | tuple):
        return type(found)(_protected(each, args) for each in found)
    is_new = type(found) is Tensor and not any(found is each for each in args)
    return Protected(found) if is_new else found


ForkingPickler.register(LiveTensor, LiveTensor._reduced)  # between processes of one machine: this rank's
