"""The update of buckets: parts of their shards to kernel calls, of several buckets in one where launches are small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from zerox import ops
from zerox._C import Range
from zerox.bucket import Bucket, GradPart


@dataclass
class Shard:
    """A part of a bucket's shard as the kernels take it."""

    param: Tensor
    master: Tensor | None
    grad: Tensor
    moments: tuple[Tensor, Tensor, Tensor | None]
    scales: list[Tensor]
    tables: tuple[Tensor, Tensor, Tensor]  # segments, present, steps

    @staticmethod
    def of(bucket: Bucket, part: GradPart, present: Tensor) -> Shard:
        elements = slice(part.start, part.start + part.grad.numel())
        rows = slice(part.first_row, part.first_row + len(part.segments))
        whole = part.grad.numel() == bucket.param_shard.numel()

        def part_of(tensor: Tensor | None) -> Any:
            return tensor if whole or tensor is None else tensor[elements]

        exp_avg, exp_avg_sq, maximum = bucket.moments.arguments()
        return Shard(
            part_of(bucket.param_shard),
            part_of(bucket.master),
            part.grad,
            (part_of(exp_avg), part_of(exp_avg_sq), part_of(maximum)),
            list((bucket.moments.scales if whole else bucket.moments.scales_of(elements)).values()),
            (part.segments, present[rows], bucket.steps[rows]),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Shards of one kind can be updated by one launch."""
        master, maximum = self.master, self.moments[2]
        dtypes = (self.param.dtype, self.grad.dtype, self.moments[0].dtype, None if master is None else master.dtype)
        return (*dtypes, maximum is None)


def update(shards: Sequence[Shard], options: Tensor, grad_scale: Tensor | None) -> None:
    """One step: state, master and parameters in place, in one pass."""
    if len(shards) == 1:
        _update_one(shards[0], options, grad_scale)
        return
    for _, group in groupby(shards, key=lambda shard: shard.kind):
        alike = list(group)
        if len(alike) == 1:
            _update_one(alike[0], options, grad_scale)
        else:
            ops.adam_together_(
                [(s.param, s.master, s.grad, s.moments) for s in alike],
                [s.tables for s in alike],
                options,
                grad_scale,
                [scale for s in alike for scale in s.scales],
            )


def _update_one(s: Shard, options: Tensor, grad_scale: Tensor | None) -> None:
    ops.adam_(s.param, s.master, s.grad, s.moments, *s.tables, options, grad_scale, s.scales)


# A launch takes about as long as a GPU needs for the bytes of a few hundred thousand elements.
LEAST_IN_A_LAUNCH = 4 * 2**20


def launches(order: Sequence[int], buckets: Sequence[Bucket]) -> Iterator[list[int]]:
    """``order`` cut into runs of buckets that are updated together, before the gather of any of them begins.

    On a GPU so many as have elements for a launch. The CPU has no launches.
    """
    run: list[int] = []
    numel = 0
    for index in order:
        shard = buckets[index].param_shard
        run.append(index)
        numel += shard.numel()
        if numel >= LEAST_IN_A_LAUNCH or shard.is_cpu:
            yield run
            run, numel = [], 0
    if run:
        yield run


def ranges(run: Sequence[int]) -> AbstractContextManager[object]:
    """For profilers: each bucket of the run is being updated."""
    if len(run) == 1:
        return Range("update", run[0])
    together = ExitStack()
    for index in run:
        together.enter_context(Range("update", index))
    return together
