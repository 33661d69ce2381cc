"""A whole tensor of which this rank has a segment, and reads the rest where it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from zerox import _torch
from zerox.plan.span import Span
from zerox.sliced_tensor import SlicedTensor

KEPT = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, *_torch.TO_COPY)
MAKES = _torch.overloads(  # of which only the shape is read
    *("empty_like.default", "zeros_like.default", "ones_like.default", "full_like.default", "rand_like.default"),
    *("randn_like.default", "new_empty.default", "new_zeros.default", "new_ones.default", "new_full.default"),
)
PULLED = methodcaller("pulled")


class PulledTensor(SlicedTensor):
    """One whose other values other ranks have: ``pull()`` gives the whole tensor, a new one on the host, with no
    partner. It raises RuntimeError if the state has changed since.

    Pickling, ``numpy()``, ``tolist()``, ``item()``, printing and operators pull: what they give is of a copy.
    ``detach``, ``clone``, ``to()``, ``cpu()`` and deepcopy give this rank's segment, as it is now, of the same whole.
    What would write it raises RuntimeError.

    ``own`` is made when it is first looked at, if the state is stored in another form: a state dict takes no memory.

    ``int16``: of masters that are kept so, this rank's values as they are, exact also if the parameter has another
    value where they are loaded; None once DCP has filled others in.
    """

    kept: Tensor | Callable[[], Tensor]
    own_numel: int
    pull: Callable[[], Tensor]
    int16: Tensor | None
    is_filled: bool  # by DCP: what other ranks have is older
    is_being_filled: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        span: Span,
        values: Tensor | Callable[[], Tensor],
        pull: Callable[[], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> PulledTensor:
        made: PulledTensor = _torch.make_wrapper(cls, tuple(shape), tuple(strides), dtype=dtype, device=device)
        made.kept, made.start, made.part, made.cut = values, span.start, (tuple(shape), tuple(strides)), None
        made.own_numel = span.numel
        made.pull, made.int16 = pull, None
        made.is_filled = made.is_being_filled = False
        return made

    @property
    def own(self) -> Tensor:  # type: ignore[override]
        if not isinstance(self.kept, Tensor):
            self.kept = self.kept()
        return self.kept

    @own.setter
    def own(self, values: Tensor) -> None:
        self.kept = values

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.own_numel)

    def fill_with(self, values: Tensor) -> PulledTensor:
        made = PulledTensor(*self.part, self.span, values, self._puller(), values.dtype, values.device)
        made.is_filled = self.is_filled
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> PulledTensor:
        return self._copied(torch.clone)

    def _copied(self, how: Callable[..., Tensor], **kwargs: Any) -> PulledTensor:
        made = self.fill_with(how(self.own, **kwargs))
        if self.int16 is not None:
            made.int16 = how(self.int16, **{key: value for key, value in kwargs.items() if key != "dtype"})
        return made

    def share(self) -> SlicedTensor:
        """This rank's segment, of its own, which pulls nothing any more."""
        return SlicedTensor(*self.part, self.span, self.own.clone())

    def as_remainder(self) -> SlicedTensor:
        """This rank's, where there is one."""
        assert self.int16 is not None
        return SlicedTensor(*self.part, self.span, self.int16)

    def pulled(self) -> Tensor:
        """The whole tensor, a new one, on the device of this one."""
        return self._on_host().to(self.device)

    def _on_host(self) -> Tensor:
        if self.is_filled:
            raise RuntimeError(FILLED)
        return self._puller()().to(self.dtype)

    def _puller(self) -> Callable[[], Tensor]:
        return self.pull

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in KEPT:
            return args[0]._copied(func, **{key: value for key, value in kwargs.items() if key != "memory_format"})
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(
            args[0].shape
        ):  # DCP begins to stage it
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in MAKES:
            like = torch.empty_strided(*args[0].part, dtype=args[0].dtype, device=args[0].device)
            return func(like, *args[1:], **kwargs)
        if holds(PulledTensor, _torch.written_by(func, args, kwargs)):
            raise RuntimeError(WRITTEN.format(func))
        args, kwargs = (with_plain(PulledTensor, each, PULLED) for each in (args, kwargs))
        return func(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.pulled().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.pulled().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.pulled(), spec)

    def __setitem__(self, *_: Any) -> None:
        raise RuntimeError(WRITTEN.format("an assignment"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self.pulled())
        except RuntimeError as error:  # a debugger shows it
            return f"PulledTensor(shape={tuple(self.shape)}, {self.dtype}, {self.device}, not read: {error})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As full_state_dict() has it, on the host: whoever pickles a state keeps all of it."""
        return self._on_host().__reduce_ex__(protocol)

    def _reduced(self) -> Any:
        return self.share()._reduced()

    # ---- DCP's protocol

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        self.is_being_filled = False
        return super().__create_write_items__(fqn, whole)

    def __create_chunk_list__(self) -> list[Any]:
        """It is about to be filled."""
        self.int16, self.is_filled, self.is_being_filled = None, True, True
        return super().__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        found = super().__get_tensor_shard__(index)
        return found.as_subclass(OfNumbers) if self.is_being_filled else found


WRITTEN = (
    "zerox: {} writes a tensor of state_dict(), or a copy of one of optimizer.state, of which other ranks have a part: "
    "write optimizer.state, or call optimizer.set_full_state_()"
)


class OfNumbers(Tensor):
    """What DCP fills, if it has numbers: DCP compares sizes only, and codes of 8 bits would become moments."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and args[1].dtype is torch.uint8:
            raise RuntimeError(CODES)
        return super().__torch_function__(func, types, args, kwargs or {})


FILLED = (
    "zerox: torch.distributed.checkpoint has filled this state_dict(), on each rank its own part: load it with "
    "optimizer.load_state_dict() first, and read optimizer.state_dict() then"
)
CODES = (
    "zerox: this checkpoint has codes of 8 bits, which state_dict() of several ranks shows as float32 since one rank "
    "reads all of it. Load it with ZEROX_STATE_PULL=0, or by get_optimizer_state_dict() and set_optimizer_state_dict() "
    "of torch.distributed.checkpoint.state_dict"
)


def holds(kind: type, value: Any) -> bool:
    """Whether an operator's argument is such a tensor, or a list that has one."""
    return isinstance(value, kind) or (isinstance(value, list | tuple) and any(holds(kind, each) for each in value))


def with_plain(kind: type, values: Any, plain: Callable[[Any], Tensor]) -> Any:
    """An operator's arguments with ``plain`` tensors in place of these, also in lists of them."""
    if isinstance(values, kind):
        return plain(values)
    if isinstance(values, dict):
        return {key: with_plain(kind, value, plain) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(with_plain(kind, value, plain) for value in values)
    return values


ForkingPickler.register(PulledTensor, PulledTensor._reduced)  # between processes of one machine nothing is lost
