"""Bytes that this rank holds, by category, from the real storages; zerox/estimate.py has them by formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zerox.memory.bucket import Member
from zerox.optimizer.core import Core
from zerox.ranks.dtensors import local_of
from zerox.residency.residency import Residency
from zerox.rules.rule import MASTERS


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on one rank.

    ``parameters``, ``gradients``, ``master`` and ``moments`` stay from step to step (gradients until zero_grad); with
    a zerox.Sparsity its masks are among ``moments``.
    ``exchange`` is the maximum of the buffers of buckets in flight. ``local_gradients`` is the maximum of gradients
    that have not left yet: all of them if the wire stalls, inside ``no_sync()``, or in stage 1. If the wire keeps up
    with backward, they take ``typical_local_gradients``: in stage 2 those of one bucket.

    ``peak`` is the maximum of all together if the wire stalls, ``typical_peak`` if it keeps up, from ``zero_grad()``
    through one backward to the end of ``step()``, without the model's activations. It has what Muon's update allocates
    inside ``step()``. In stage 3 backward waits for the wire, so ``peak`` is little more: it holds for ranks that come
    within a minute of each other, or within two seconds if not all are on one machine. Over nccl memory is free in the
    order in which the host launches work, and both are the same. They are less than the sum of the maxima above, which
    don't coincide.

    ``peak_of_construction`` is the maximum while an optimizer gives a model on the meta device (``model=``) its first
    values, without the model's buffers and what its functions of init allocate themselves. 0 where nothing is on meta.

    ``fullest_rank``: in an estimate where ranks own whole parameters (Muon's matrices, ``whole=``), the one that has
    most elements. All numbers are those of that rank. None: no rank has more than others, or the bytes are counted.
    ``slowest_over_mean``: there too, the work of the rank that has most of it, over the mean: a step waits for it.
    """

    parameters: int
    gradients: int
    master: int
    moments: int
    exchange: int = 0
    local_gradients: int = 0
    typical_local_gradients: int = 0
    peak: int = 0
    typical_peak: int = 0
    peak_of_construction: int = 0
    fullest_rank: int | None = None
    slowest_over_mean: float | None = None

    @property
    def lasting(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.master + self.moments


def measure(core: Core) -> MemoryBytes:
    """Bytes of the storages that this rank holds, once everything in flight has been reduced."""
    core.manager.flights.await_all()
    moved = [core.buckets[index].members[slot] for index, slot in core.grads.find_moved()]
    tables = {id(table.param) for table in core.tables}
    dense = [member for member in core.members if id(member.param) not in tables]
    whole = [] if core.grads.sharded else [local_of(member.param.grad) for member in dense]
    whole += core.calls.own.values()
    state = [stored for bucket in core.buckets for stored in bucket.state.values()]
    state += [stored for table in core.tables for stored in table.state.values()]
    state += [table.master for table in core.tables if table.master is not None]
    masters = [stored for stored in state if stored.spec in MASTERS]
    others = [stored for stored in state if stored.spec not in MASTERS]
    masks = [bucket.mask.bits for bucket in core.buckets if bucket.mask is not None]
    return MemoryBytes(
        parameters=_parameters(core, moved) + _bytes_of(core.calls.own.params.values()),
        gradients=_bytes_of([*whole, *core.grads.reduced_tensors(), *core.calls.row_grads.tensors()]),
        master=_bytes_of(tensor for stored in masters for tensor in stored.tensors().values()),
        moments=_bytes_of(
            [*masks, *core.calls.own.tensors_of_state(), *(t for stored in others for t in stored.tensors().values())]
        ),
    )


def _parameters(core: Core, moved: list[Member]) -> int:
    if isinstance(core.gather, Residency):
        residents, all_kept = core.gather.residents, [each.buffer.own for each in core.gather.all]
        if not residents.has_shards:
            all_kept += [each.buffer.flat for each in core.gather.all]
        rooms = residents.room_bytes if residents.has_shards else 0
        return _bytes_of([*all_kept, *(m.local for m in moved)]) + rooms
    alone = [*(m.local for m in core.frozen + moved), *(table.param for table in core.tables)]
    return _bytes_of([*(bucket.buffer.flat for bucket in core.buckets), *alone])


def _bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
