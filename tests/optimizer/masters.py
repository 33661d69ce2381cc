"""The exact values behind 16-bit parameters, from what an optimizer keeps, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zerox import FusedShardedAdam
from zerox.memory.bucket import Bucket
from zerox.rules.rule import REMAINDER


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of bf16 parameters and what rounding half away lost, in plain integers."""
    high = param.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def half_away(master: Tensor) -> Tensor:
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def exact_values(bucket: Bucket, span: slice) -> Tensor:
    """A copy: the masters of a range of the own shard, or where none are kept the parameters in fp32 (fp64 as is)."""
    values = bucket.param_shard[span]
    if bucket.master is None:
        return values.clone() if values.dtype is torch.float64 else values.float().clone()
    master = bucket.master.values[span]
    return join(values, master) if bucket.master.spec == REMAINDER else master.clone()


def rounded(bucket: Bucket, exact: Tensor) -> Tensor:
    """What the parameters must be where their exact values are these."""
    return half_away(exact) if REMAINDER.key in bucket.state else exact.to(bucket.param_shard.dtype)


def parts_of(optimizer: FusedShardedAdam) -> Iterator[tuple[Tensor, slice, Bucket, slice, dict[str, Tensor]]]:
    """Each parameter of which this rank owns something: the range of its elements, where they lie in which bucket's
    shard, and the views of their state as 1-D."""
    for bucket in optimizer.inside.buckets:
        for segment, (param, state) in zip(bucket.own_segments, bucket.state_of_own(), strict=True):
            elements = slice(segment.param_start, segment.param_start + segment.span.numel)
            shard = slice(segment.span.start, segment.span.stop)
            flat = {key: each if key == "step" else in_memory_order(each) for key, each in state.items()}
            yield param, elements, bucket, shard, flat


def in_memory_order(dense: Tensor) -> Tensor:
    """All elements of a tensor without gaps in the order in which they lie in memory."""
    return dense.detach().as_strided((dense.numel(),), (1,), dense.storage_offset())
