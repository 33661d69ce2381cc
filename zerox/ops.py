"""The kernels as typed functions over ``torch.ops.zerox``, and their fake versions for tracing.

Shapes, per bucket: a shard has ``n`` elements, of which ``s`` segments (one parameter's part each, a row
``(start, stop, options_row, param, param_start)`` of an int64 ``[s, 5]`` table; ``param`` is the parameter's number,
``param_start`` where in it the segment starts) are parameters and the rest padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerox import _C as C

EXACT_WORDS: int = C.EXACT_WORDS
OPTIONS_COLUMNS = 8


def flatten_(flat: Tensor, sources: list[Tensor], pieces: Tensor, flags: Tensor) -> None:
    """Packs and casts pieces of ``sources`` into ``flat``, sets ``flat[flags]`` to 1 and everything else to 0.

    ``pieces``: int64 ``[p, 4]``, rows ``(source, source_start, flat_start, numel)`` sorted by ``flat_start``;
    elements of a source are counted in memory order, which must be dense. Raises ValueError for rows that overlap or
    leave their tensor.
    """
    torch.ops.zerox.flatten_(flat, sources, pieces, flags)


def read_flags_(present: Tensor, replaced: Tensor, slices: list[Tensor], shard_numel: int) -> None:
    """Reads what each rank says of each segment from behind the shard in its slice. uint8 ``[s]`` in and out.

    Two flags a segment: "present" and "replace what you hold". ``replaced`` becomes 1 where any rank says so;
    ``present`` becomes 1 where any rank is present, stays where it is 1 and not replaced, else becomes 0.
    """
    torch.ops.zerox.read_flags_(present, replaced, slices, shard_numel)


def reduce_(
    shard: Tensor, words: Tensor, slices: list[Tensor], segments: Tensor, replaced: Tensor, world: int, accumulate: bool
) -> None:
    """``shard = sum(slices) / world``, added in the given order in fp32 (fp64 for fp64), divided once, rounded once.

    With ``accumulate`` the old shard is added before rounding, except in segments that are ``replaced``. Adds the sum
    of squares of what was stored to ``words`` (int64 ``[EXACT_WORDS]``, see ``csrc/math/exact_sum.h``).
    """
    torch.ops.zerox.reduce_(shard, words, slices, segments, replaced, world, accumulate)


def norm_(words: Tensor, shard: Tensor, segments: Tensor, p: float) -> None:
    """Adds ``sum |x|^p`` over the segments to ``words``; for ``p = inf`` keeps the largest ``|x|``."""
    torch.ops.zerox.norm_(words, shard, segments, p)


def norm_value(words: Tensor, p: float) -> Tensor:
    """float64 ``[2]``: the norm that ``words`` stands for, and 1 if every element was finite, else 0."""
    return torch.ops.zerox.norm_value(words, p)


def adam_(
    param: Tensor,
    master: Tensor | None,
    grad: Tensor,
    moments: tuple[Tensor, Tensor, Tensor | None],
    segments: Tensor,
    present: Tensor,
    steps: Tensor,
    options: Tensor,
    grad_scale: Tensor | None,
    scales: Sequence[Tensor] = (),
) -> None:
    """One step of torch.optim.AdamW / Adam on a shard, in place, in one pass.

    ``param`` ``[n]``; ``master``: int16 remainders of bfloat16 parameters, float32 copies of 16-bit ones, or None;
    ``grad`` ``[n]`` of any floating dtype (float64 only beside float64 parameters), multiplied by ``grad_scale`` (a
    float64 scalar) first; ``moments``: exp_avg, exp_avg_sq, and max_exp_avg_sq where a row of ``options`` has amsgrad,
    float64 for float64 parameters, else float32, bfloat16 (rounded stochastically: ``csrc/math/random.h``), or uint8
    codes with ``scales``, float32 ``[ceil(n / 256)]`` for each moment (``csrc/math/dynamic_map.h``). Segments whose
    ``present`` (uint8 ``[s]``) is 0 are left alone; the others count their ``steps`` (int64 ``[s]``) up. ``options``:
    float64 ``[groups, 8]``, rows ``(lr, beta1, beta2, eps, weight_decay, maximize, decoupled, amsgrad)``. Raises
    ValueError where these don't fit together.
    """
    torch.ops.zerox.adam_(param, master, grad, *moments, scales, segments, present, steps, options, grad_scale)


def adam_together_(
    shards: Sequence[tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, Tensor | None]]],
    tables: Sequence[tuple[Tensor, Tensor, Tensor]],
    options: Tensor,
    grad_scale: Tensor | None,
    scales: Sequence[Tensor] = (),
) -> None:
    """:func:`adam_` on several shards of the same dtypes: on a GPU in few launches, however small they are.

    ``shards``: each one's ``(param, master, grad, moments)``; ``tables``: ``(segments, present, steps)``; ``scales``:
    those of the first shard's moments, then the next one's. Masters and max_exp_avg_sq have all shards, or none.
    """
    params, masters, grads, moments = zip(*shards, strict=True)
    exp_avgs, exp_avg_sqs, maxima = zip(*moments, strict=True)
    segments, present, steps = zip(*tables, strict=True)
    given_masters, given_maxima = ([each for each in found if each is not None] for found in (masters, maxima))
    torch.ops.zerox.adam_together_(
        *(params, given_masters, grads, exp_avgs, exp_avg_sqs, given_maxima, scales),
        *(segments, present, steps, options, grad_scale),
    )


def _changes_arguments_only(*_args: object) -> None:
    """What a tracer needs to know of an op that returns nothing."""


for _name in ("flatten_", "read_flags_", "reduce_", "norm_", "adam_", "adam_together_"):
    torch.library.register_fake(f"zerox::{_name}", _changes_arguments_only)


@torch.library.register_fake("zerox::norm_value")
def _norm_value(words: Tensor, p: float) -> Tensor:
    return words.new_empty(2, dtype=torch.float64)
