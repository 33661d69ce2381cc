"""One parameter's part of a bucket's state, filled from parts in whatever form they were saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zerox.bucket import FP32, MASTER, REMAINDER, Bucket
from zerox.moments import BLOCK_NUMEL, SCALE
from zerox.sliced_state import STEP
from zerox.stored_forms import master_of, remainder_of, rounding_to, store_moment

PIECE_NUMEL = 2**18
assert PIECE_NUMEL % BLOCK_NUMEL == 0


def fill_row(bucket: Bucket, row: int, parts: Mapping[str, Tensor], rest_anew: bool) -> list[str]:
    """Copies ``parts`` (by their key in the optimizer's state, 1-D, on any device) into the segment ``row``.

    With ``rest_anew`` what they lack becomes as for a parameter that was never updated, else stays as it is. Returns
    what had to be rounded. The parameter's own value must be there already.
    """
    own = slice(bucket.own_segments[row].span.start, bucket.own_segments[row].span.stop)
    param = bucket.param_shard[own]
    parts = {key: part.to(param.device) for key, part in parts.items()}
    rounded: dict[str, None] = {}
    if STEP in parts:
        bucket.steps[row] = parts[STEP].reshape(()).to(torch.int64)
    elif rest_anew:
        bucket.steps[row] = 0
    scales = bucket.moments.scales_of(own)
    for name, shard in bucket.moments.values.items():
        if name in parts:
            own_scales = scales.get(name + SCALE)
            for piece, blocks in pieces(param.numel()):
                given_scales = parts[name + SCALE][blocks] if name + SCALE in parts else None
                its = own_scales[blocks] if own_scales is not None else None
                if store_moment(name, parts[name][piece], given_scales, shard[own][piece], its):
                    rounded[f"{name} to {'8 bits' if its is not None else shard.dtype}"] = None
        elif rest_anew:
            shard[own].zero_()
            for each in (scales[name + SCALE],) if name + SCALE in scales else ():
                each.zero_()
    has_master = MASTER in parts or REMAINDER in parts
    if bucket.master is None and has_master:
        rounded["masters to the parameters' dtype"] = None
    elif bucket.master is not None and (has_master or rest_anew):
        masters = {key: parts[key] for key in (MASTER, REMAINDER) if key in parts}
        for piece, _ in pieces(param.numel()):
            given = {key: part[piece] for key, part in masters.items()}
            bucket.master[own][piece] = _master(bucket, param[piece], given)
    return list(rounded)


def pieces(numel: int) -> Iterator[tuple[slice, slice]]:
    """(elements, their blocks) in turn: what conversions compute on the way need not be as large as a parameter."""
    for start in range(0, numel, PIECE_NUMEL):
        stop = start + PIECE_NUMEL
        yield slice(start, stop), slice(start // BLOCK_NUMEL, stop // BLOCK_NUMEL)


def _master(bucket: Bucket, param: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """In the bucket's form; without one among ``parts`` it is the parameter's value."""
    if bucket.master_kind == REMAINDER:
        if REMAINDER in parts:
            return parts[REMAINDER]
        return remainder_of(param, parts[MASTER].float() if MASTER in parts else param.float())
    assert bucket.master_kind == FP32
    if REMAINDER in parts:
        return rounding_to(param, master_of(param, parts[REMAINDER]))
    return parts.get(MASTER, param)
