"""The update of buckets: kernel calls on parts of their shards, with several small buckets in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby

from torch import Tensor

from zerox import ops
from zerox._C import Range
from zerox.memory.bucket import Bucket, GradPart
from zerox.ops import Shard
from zerox.rules.rule import MASTERS, Rule


def shard_of(bucket: Bucket, part: GradPart, present: Tensor) -> Shard:
    """A part of a bucket's shard as the kernels take it."""
    elements = slice(part.start, part.start + part.grad.numel())
    rows = slice(part.first_row, part.first_row + len(part.segments))
    whole = part.grad.numel() == bucket.param_shard.numel()
    kept = {key: stored if whole else stored.part(elements) for key, stored in bucket.state.items()}
    master = next((kept.pop(spec.key).values for spec in MASTERS if spec.key in kept), None)
    return Shard(
        param=bucket.param_shard if whole else bucket.param_shard[elements],
        master=master,
        grad=part.grad,
        state=[stored.values for stored in kept.values()],
        scales=[stored.scales for stored in kept.values() if stored.scales is not None],
        segments=part.segments,
        present=present[rows],
        steps=bucket.steps[rows],
    )


def update(rule: Rule, shards: Sequence[Shard], options: Tensor, grad_scale: Tensor | None) -> None:
    """One step: state, master and parameters in place, in one pass."""
    for _, alike in groupby(shards, key=_kind):
        ops.update_(rule.name, list(alike), options, grad_scale)


def _kind(shard: Shard) -> tuple[object, ...]:
    """Shards of one kind can be updated by one launch."""
    master = None if shard.master is None else shard.master.dtype
    return (shard.param.dtype, shard.grad.dtype, master, *(values.dtype for values in shard.state))


# A launch takes about as long as a GPU needs for the bytes of a few hundred thousand elements.
LEAST_IN_A_LAUNCH = 4 * 2**20


def launches(order: Sequence[int], buckets: Sequence[Bucket]) -> Iterator[list[int]]:
    """``order`` cut into runs of buckets that are updated together, before the gather of any of them begins.

    A run has one rule. On a GPU it has enough elements for a launch. The CPU has no launches: a run is one bucket.
    """
    for _, alike in groupby(order, key=lambda index: buckets[index].rule.name):
        run: list[int] = []
        numel = 0
        for index in alike:
            shard = buckets[index].param_shard
            run.append(index)
            numel += shard.numel()
            if numel >= LEAST_IN_A_LAUNCH or shard.is_cpu:
                yield run
                run, numel = [], 0
        if run:
            yield run


def ranges(run: Sequence[int]) -> AbstractContextManager[object]:
    """For profilers: one range for each bucket of the run."""
    if len(run) == 1:
        return Range("update", run[0])
    together = ExitStack()
    for index in run:
        together.enter_context(Range("update", index))
    return together
