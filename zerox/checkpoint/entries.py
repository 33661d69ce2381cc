"""The optimizer's state as a checkpoint has it: "name.exp_avg" and so on, whole tensors that ranks have slices of.

Nothing of it depends on the number of ranks, stage, buckets, padding or the order of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from zerox.bucket import Bucket
from zerox.buffers import dense_strides
from zerox.checkpoint.sliced_tensor import SlicedTensor
from zerox.moments import BLOCK_NUMEL
from zerox.plan.layout import Segment
from zerox.plan.span import Span

STEP = "step"


def entries(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """By "name.what": this rank's slices, which are views of the state, and step counts, 0-d.

    ``what`` is a key of the optimizer's state: exp_avg, exp_avg_sq and max_exp_avg_sq of the parameter's shape, in the
    dtype that they are stored in; beside 8-bit codes exp_avg_scale and so on, float32, one for each 256 elements in
    memory order; remainder or master of the parameter's shape; step, int64.
    """
    found: dict[str, Tensor] = {}
    for bucket in buckets:
        for row, segment in enumerate(bucket.own_segments):
            name = bucket.members[segment.slot].name
            found[f"{name}.{STEP}"] = bucket.steps[row]
            for what, tensor in _of_segment(bucket, segment):
                found[f"{name}.{what}"] = tensor
    return found


def _of_segment(bucket: Bucket, segment: Segment) -> Iterator[tuple[str, SlicedTensor]]:
    param = bucket.members[segment.slot].param
    span = Span(segment.param_start, segment.param_start + segment.span.numel)
    own = slice(segment.span.start, segment.span.stop)
    if param.numel() == 0:
        return
    for what, shard in bucket.state_shards().items():
        yield what, SlicedTensor(param.shape, dense_strides(param), span, shard[own])
    # Blocks are counted from the parameter's start, and no shard cuts one.
    num_blocks = math.ceil(param.numel() / BLOCK_NUMEL)
    blocks = Span(span.start // BLOCK_NUMEL, math.ceil(span.stop / BLOCK_NUMEL))
    for what, scales in bucket.moments.scales_of(own).items():
        yield what, SlicedTensor((num_blocks,), (1,), blocks, scales)
