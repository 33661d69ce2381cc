"""A whole tensor of which this rank has a slice, as torch.distributed.checkpoint (DCP) saves and loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerox.plan.rectangles import rectangles
from zerox.plan.span import Span


class SlicedTensor(Tensor):
    """A tensor of ``shape`` with elements in memory as ``strides`` say; ``values`` has those of ``span``, 1-D.

    DCP asks it for rectangles, which are views of ``values``: saving reads them, loading writes into them. Where
    ranks have all elements between them, each once, they save the whole tensor in parallel, and any other ranks load
    it with whatever slices they have. It has no values of its own: operators raise RuntimeError.
    """

    _chunks: list[ChunkStorageMetadata]
    _shards: list[Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], strides: Sequence[int], span: Span, values: Tensor) -> SlicedTensor:
        if values.dim() != 1 or values.numel() != span.numel:
            raise ValueError(f"a slice of {span.numel} elements needs as many values, got {tuple(values.shape)}")
        made: SlicedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), tuple(strides), dtype=values.dtype, device=values.device
        )
        found = rectangles(shape, strides, span)
        made._chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in found]
        made._shards = []
        for each in found:
            start = values.storage_offset() + each.span.start - span.start
            # Within a rectangle the elements lie as they do in the tensor: it is contiguous there.
            made._shards.append(values.as_strided(each.sizes, tuple(strides), start))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} on a SlicedTensor: this rank has a slice of it, for torch.distributed.checkpoint")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = sum(shard.numel() for shard in self._shards)
        return f"SlicedTensor({held} elements of {tuple(self.shape)}, {self.dtype}, {self.device})"

    # ---- DCP's protocol

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """LookupError if this rank has no rectangle there."""
        for chunk, shard in zip(self._chunks, self._shards, strict=True):
            if chunk.offsets == index.offset:
                return shard
        raise LookupError(f"no slice of '{index.fqn}' starts at {index.offset} on this rank")
