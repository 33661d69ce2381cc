"""A whole tensor of which this rank has a segment: in state_dict(), and for torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from zerox import _torch
from zerox.plan.cut import Cut, dense, slowest_first
from zerox.plan.environment import STATE_PULL, is_state_pulled
from zerox.plan.rectangles import Rectangle, rectangles
from zerox.plan.span import Span


class SlicedTensor(Tensor):
    """A tensor of ``shape`` and ``strides``, of which this rank has the elements of ``span``: ``values``, 1-D.

    ``cut``: such a tensor is this rank's part of a larger one, whose shape this one then has for everybody else.

    DCP asks it for rectangles, which are views of ``values``: saving reads them, loading writes into them. If ranks
    have all elements between them, they save the whole tensor in parallel, and any other ranks load it, whatever
    segments they have. It can be copied, pickled and moved to another device; other operators raise RuntimeError, since
    they would compute on one rank's share only.
    """

    own: Tensor
    start: int
    part: tuple[tuple[int, ...], tuple[int, ...]]  # the shape and strides in which ``span`` counts
    cut: Cut | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], strides: Sequence[int], span: Span, values: Tensor, cut: Cut | None = None
    ) -> SlicedTensor:
        if values.dim() != 1 or values.numel() != span.numel:
            raise ValueError(f"a segment of {span.numel} elements needs as many values, got {tuple(values.shape)}")
        part = tuple(shape), tuple(strides)
        seen = part if cut is None else (cut.shape, dense(cut.shape, slowest_first(shape, strides)))
        made: SlicedTensor = _torch.make_wrapper(cls, *seen, dtype=values.dtype, device=values.device)
        # DCP's async saves stage all tensors among the attributes.
        made.own, made.start, made.part, made.cut = values, span.start, part, cut
        return made

    @property
    def span(self) -> Span:
        """This rank's elements, in memory order."""
        return Span(self.start, self.start + self.own.numel())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = f"elements {self.start} to {self.span.stop}" if self.own.numel() else "no element"
        of = tuple(self.shape) if self.cut is None else f"{self.part[0]} at {self.cut.offsets} of {self.cut.shape}"
        return f"SlicedTensor({held} of {of}, {self.dtype}, {self.device})"

    @property
    def has_all(self) -> bool:
        """Whether this rank has the whole tensor."""
        return self.cut is None and self.own.numel() == self.numel()

    def whole(self) -> Tensor:
        """The tensor itself, of which this rank ``has_all``: a view."""
        return self.own.as_strided(*self.part, self.own.storage_offset())

    def fill_with(self, values: Tensor) -> SlicedTensor:
        """The same elements of a tensor with these values."""
        return SlicedTensor(*self.part, self.span, values, self.cut)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        self, aten = args[0], torch.ops.aten
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, *_torch.TO_COPY):
            kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
            if self.dtype is not torch.uint8 or kwargs.get("dtype") in (None, torch.uint8):
                return self.fill_with(func(self.own, **kwargs))
        if func is aten.new_empty.default and tuple(args[1]) == tuple(self.shape):  # how DCP starts to stage it
            return self.fill_with(self.own.new_empty(self.own.shape, **kwargs))
        self = next(_slices([args, *kwargs.values()]))
        if self.dtype is torch.uint8:
            raise RuntimeError(
                f"zerox: {func} on {self!r}, which has codes of 8 bits, and no moments: state_dict() has the state as "
                "it is stored, for zerox's optimizers to load. full_state_dict() has moments in float32, which those "
                "of torch.optim load too"
            )
        raise RuntimeError(
            f"{func} on a tensor of which this rank has {self!r}: state_dict() is one rank's share. "
            "full_state_dict() gives whole tensors"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        return self.fill_with(self.own.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.own.numel() < self.numel():
            refuse_pickling()
        return self._reduced()

    def _reduced(self) -> Any:
        cut = () if self.cut is None else (self.cut.shape, self.cut.offsets)
        return _rebuild, (*self.part, self.start, self.own, *cut)

    # ---- DCP's protocol. Its modules take a second to import; the caller has imported them.

    def _pieces(self) -> list[tuple[Rectangle, Any]]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        found = []
        for each in rectangles(*self.part, self.span):
            offsets = each.offsets if self.cut is None else self.cut.place_offsets(each.offsets)
            found.append((each, ChunkStorageMetadata(torch.Size(offsets), torch.Size(each.sizes))))
        return found

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for _, chunk in self._pieces()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk for _, chunk in self._pieces()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """LookupError if this rank has no rectangle there."""
        for rectangle, chunk in self._pieces():
            if chunk.offsets == index.offset:
                # Within a rectangle the elements lie as they do in the tensor: it is contiguous there.
                start = self.own.storage_offset() + rectangle.span.start - self.start
                return self.own.as_strided(rectangle.sizes, self.part[1], start)
        raise LookupError(f"no slice of '{index.fqn}' starts at {index.offset} on this rank")


def _slices(args: Any) -> Iterator[SlicedTensor]:
    """Those among an operator's arguments, also in lists of them."""
    for arg in args:
        if isinstance(arg, SlicedTensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _slices(arg)


def _rebuild(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, values: Tensor, *cut: tuple[int, ...]
) -> SlicedTensor:
    return SlicedTensor(shape, strides, Span(start, start + values.numel()), values, Cut(*cut) if cut else None)


def refuse_pickling() -> None:
    """RuntimeError: a reader of the file would notice only when the other ranks' moments are gone. Once a process a
    warning, if ranks are to have files of their own."""
    if is_state_pulled():
        raise RuntimeError(
            f"zerox: {IS_PICKLED}, and it can't read the rest alone, as with tables, DTensors and experts, or after a "
            f"CUDA graph: {INSTEAD}. For files of each rank set {STATE_PULL}=0"
        )
    _warn_of_pickling()


@functools.cache
def _warn_of_pickling() -> None:
    warnings.warn(
        f"zerox: {IS_PICKLED}: without the files of all other ranks their moments are lost. To have them all, "
        f"{INSTEAD}",
        stacklevel=5,
    )


IS_PICKLED = "optimizer.state_dict() is being pickled, and of several ranks it is this rank's share only"
INSTEAD = (
    "call optimizer.consolidate_state_dict() on all ranks before state_dict(), or use zerox.save(), "
    "optimizer.full_state_dict() or torch.distributed.checkpoint"
)


# It may be sent: between processes of one machine, as in DCP's background saves, nothing is lost.
ForkingPickler.register(SlicedTensor, SlicedTensor._reduced)
torch.serialization.add_safe_globals([_rebuild])  # torch.load(weights_only=True) of what torch.save wrote
