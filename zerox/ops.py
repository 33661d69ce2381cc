"""The kernels as typed functions over ``torch.ops.zerox``, and their fake versions for tracing.

Shapes, per bucket: a shard has ``n`` elements, in ``s`` segments; the rest is padding. A segment is one parameter's
part: a row ``(start, stop, options_row, param, param_start)`` of an int64 ``[s, 5]`` table. ``param`` is the
parameter's number, and the segment starts at the parameter's element ``param_start``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from zerox import _C as C

EXACT_LIMBS: int = C.EXACT_LIMBS
SEGMENT_COLUMNS: int = C.SEGMENT_COLUMNS


def flatten_(flat: Tensor, sources: list[Tensor], pieces: Tensor, flags: Tensor) -> None:
    """Packs and casts pieces of ``sources`` into ``flat``, sets ``flat[flags]`` to 1 and everything else to 0.

    ``pieces``: int64 ``[p, 4]``, rows ``(source, source_start, flat_start, numel)`` sorted by ``flat_start``;
    elements of a source are counted in memory order, which must be dense. Raises ValueError for rows that overlap or
    leave their tensor.
    """
    torch.ops.zerox.flatten_(flat, sources, pieces, flags)


def read_flags_(present: Tensor, replaced: Tensor, slices: list[Tensor], shard_numel: int) -> None:
    """Reads each rank's flags of each segment, which lie behind the shard in its slice. uint8 ``[s]`` in and out.

    Two flags a segment: "present" and "replace what you hold". ``replaced`` becomes 1 where any rank sets the second;
    ``present`` becomes 1 where any rank sets the first, stays 1 where it was and is not replaced, else becomes 0.
    """
    torch.ops.zerox.read_flags_(present, replaced, slices, shard_numel)


def reduce_(
    shard: Tensor,
    limbs: Tensor,
    slices: list[Tensor],
    segments: Tensor,
    replaced: Tensor,
    divisor: float,
    accumulate: bool,
) -> None:
    """``shard = sum(slices) / divisor``, added in the given order in fp32 (fp64 for fp64), divided once, rounded once.

    With ``accumulate`` the old shard is added before rounding, except in segments that are ``replaced``. Adds the sum
    of squares of what was stored to ``limbs`` (int64 ``[EXACT_LIMBS]``, see ``csrc/math/exact_sum.h``).
    """
    torch.ops.zerox.reduce_(shard, limbs, slices, segments, replaced, divisor, accumulate)


def norm_(limbs: Tensor, shard: Tensor, segments: Tensor, p: float, mask: Tensor | None = None) -> None:
    """Adds ``sum |x|^p`` over the segments to ``limbs``; for ``p = inf`` keeps the largest ``|x|``. Of int64
    ``[segments, EXACT_LIMBS]``, each row is one segment's.

    ``mask``: of the elements that count, see :class:`Shard`.
    """
    torch.ops.zerox.norm_(limbs, shard, segments, p, mask)


def norm_value(limbs: Tensor, p: float) -> Tensor:
    """float64 ``[2]``, or ``[n, 2]`` of n sums: the norm that ``limbs`` stands for, and 1 if every element was finite,
    else 0."""
    return torch.ops.zerox.norm_value(limbs, p)


class Shard(NamedTuple):
    """The arguments of :func:`update_` for one shard ``[n]``.

    ``master``: int16 remainders of bfloat16 parameters, float32 copies of 16-bit ones, or None. ``grad`` is of any
    floating dtype (float64 only beside float64 parameters). ``state``: what the rule keeps, float64 for float64
    parameters, else float32, bfloat16 (rounded stochastically: ``csrc/math/random.h``), or uint8 codes with ``scales``,
    float32 ``[ceil(n / 256)]`` for each (``csrc/math/dynamic_map.h``). Segments whose ``present`` (uint8 ``[s]``) is 0
    are left alone; the others count their ``steps`` (int64 ``[s]``) up. ``mask``: uint8
    ``[ceil(n / 8) + 4]``, where bit ``i % 8`` of byte ``i // 8`` keeps element ``i``; parameter, master and state of
    others become 0. None keeps all.
    """

    param: Tensor
    master: Tensor | None
    grad: Tensor
    state: Sequence[Tensor]
    scales: Sequence[Tensor]
    segments: Tensor
    present: Tensor
    steps: Tensor
    mask: Tensor | None = None


def update_(rule: str, shards: Sequence[Shard], options: Tensor, grad_scale: Tensor | None = None) -> None:
    """One step of ``rule`` on shards of the same dtypes, in place: on a GPU in few launches, however small they are.

    ``rule``: the name of one in ``zerox/rules``, which says what it keeps, in which order, and under which options.
    ``options``: float64 ``[groups, columns]``, with the rule's columns. Gradients are multiplied by ``grad_scale`` (a
    float64 scalar) first. Either all shards have masters, or none. Raises ValueError for arguments that don't fit
    together.
    """
    if not shards:
        return
    params, masters, grads, states, scales, segments, present, steps, masks = zip(*shards, strict=True)
    torch.ops.zerox.update_.default(
        rule,
        params,
        [master for master in masters if master is not None],
        grads,
        [*chain.from_iterable(states)],
        [*chain.from_iterable(scales)],
        segments,
        present,
        steps,
        options,
        grad_scale,
        [_mask_of(s) for s in shards] if any(mask is not None for mask in masks) else [],
    )


def update_rows_(
    rule: str,
    values: Tensor,
    master: Tensor | None,
    grads: Tensor,
    states: Sequence[Tensor],
    step: Tensor,
    rows: Tensor,
    places: Tensor,
    options: Sequence[float],
    scale: float = 1.0,
    limit: float = math.inf,
) -> None:
    """One lazy step of ``rule`` on rows of a table: ``values`` (``[R, D]``, of 32 or 16 bits), in place.

    Row ``rows[i]`` (int64 ``[n]``, no row twice) has its gradient in ``grads[i]`` (float32 ``[n, D]``) and its states
    at ``places[i]`` of each of ``states`` (float32 ``[P, D]``), and so it has its ``master`` (as :class:`Shard` has
    one); other rows stay as they are. ``step`` (int64, on the
    host) counts up if the rule counts. ``options``: the rule's columns. Gradients are multiplied by ``scale``, then cut
    at ``limit``. Adam is torch.optim.SparseAdam's. Raises ValueError for arguments that don't fit together; rows and
    places themselves are not looked at.
    """
    torch.ops.zerox.update_rows_(
        rule, values, master, grads, list(states), step, rows, places, list(options), float(scale), float(limit)
    )


def _mask_of(shard: Shard) -> Tensor:
    return shard.present.new_empty(0) if shard.mask is None else shard.mask


def _changes_arguments_only(*_args: object) -> None:
    """What a tracer needs to know of an op that returns nothing."""


for _name in ("flatten_", "read_flags_", "reduce_", "norm_", "update_", "update_rows_"):
    torch.library.register_fake(f"zerox::{_name}", _changes_arguments_only)


@torch.library.register_fake("zerox::norm_value")
def _norm_value(limbs: Tensor, p: float) -> Tensor:
    return limbs.new_empty(2, dtype=torch.float64)
