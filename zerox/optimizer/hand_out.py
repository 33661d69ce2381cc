"""Rank 0's parameters on all ranks, as they stand: for broadcast_parameters(), and where a wrapper is built."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from zerox._C import SyncPoint
from zerox.memory.bucket import Bucket, Member
from zerox.memory.flat import ShardedBuffer, give_out, in_shared_memory, values_of
from zerox.optimizer.core import Core
from zerox.ranks.group import Ranks
from zerox.ranks.wrapped import note_hand_out
from zerox.residency.residency import Residency
from zerox.rules.rule import REMAINDER

Wanted = Callable[[Member], bool]


def hand_out(core: Core, wanted: Wanted = lambda member: True) -> None:
    """Of the parameters of one optimizer that are ``wanted``, the same on all ranks. Collective.

    Masters follow where the parameter changes. With sharded parameters (ZeRO stage 3) all ranks read the same shards:
    only what lies elsewhere (after ``param.data = ...``) is sent, from rank 0, and comes home on all.
    """
    with standing_by(core):
        core.sync(SyncPoint.BROADCAST_PARAMETERS)
    gather, subgroups, model = core.gather, core.grads.subgroups, core.grads.model
    members = [member for member in core.members if wanted(member)]
    with core.ranks.failure_told(), core.loading.pulls.of_all:
        if isinstance(gather, Residency):
            _bring_home(gather, wanted, {gather.index_of[i]: bucket for i, bucket in enumerate(core.buckets)})
        else:
            for index, bucket in enumerate(core.buckets):
                _hand_out_bucket(core, index, bucket, wanted)
            apart = [*core.frozen, *(table.member for table in core.tables)]
            for member in filter(wanted, apart):
                what = f"parameter '{member.name}'"
                subgroups.of_group[member.group].ranks.broadcast_values(member.local, what)
                model.broadcast_values(member.local, model.replicated_over(member.param))
    for member in members:
        torch.autograd.graph.increment_version(member.param)


def hand_out_buffers(ranks: Ranks, model: nn.Module) -> None:
    """Rank 0's buffers of a model to all. Collective."""
    note_hand_out(model)
    for name, buffer in model.named_buffers():
        ranks.broadcast_values(buffer, f"buffer '{name}'")


@contextmanager
def standing_by(core: Core) -> Iterator[None]:
    """Around a sync point of all ranks. With sharded parameters, one that has written some meanwhile, and the others
    not, comes too, and hand_out() follows."""
    if not isinstance(core.gather, Residency):
        yield
        return
    core.gather.residents.stand_by(True)
    try:
        yield
    finally:
        core.gather.residents.stand_by(False)


def _hand_out_bucket(core: Core, index: int, bucket: Bucket, wanted: Wanted) -> None:
    slots = [slot for slot, member in enumerate(bucket.members) if wanted(member)]
    if not slots:
        return
    before = _copy_of_shard(bucket)
    ranks, model = core.grads.subgroups.of_group[bucket.members[0].group].ranks, core.grads.model
    over = model.replicated_over(bucket.members[0].param)
    if len(slots) == len(bucket.members):
        ranks.broadcast(bucket.buffer.flat, f"the parameters of {bucket.describe(index)}")
        model.broadcast(bucket.buffer.flat, over)
    else:
        for slot in slots:
            home = bucket.buffer.home(slot)
            ranks.broadcast_values(home, f"parameter '{bucket.members[slot].name}'")
            model.broadcast_values(home, over)
    give_out([(bucket.buffer, slot) for slot in slots])
    _take_into_master(bucket, before)


def _bring_home(gather: Residency, wanted: Wanted, trained: Mapping[int, Bucket]) -> None:
    """Of sharded parameters that lie elsewhere on some rank, or were written on some rank alone. Collective.

    ``trained``: buckets, by their place among all that are sharded.
    """
    known = {
        (index, slot): buffer
        for index, (_, members, buffer) in enumerate(gather.all)
        for slot in range(len(members))
        if isinstance(buffer, ShardedBuffer)
    }
    moved = [
        (index, slot)
        for (index, slot), buffer in known.items()
        if wanted(gather.all[index].members[slot]) and not buffer.is_at_home(slot)
    ]
    with gather.ranks.refusals_told():
        for index, slot in moved:
            if misfit := known[index, slot].misfit(slot, gather.all[index].members[slot].name):
                raise ValueError(misfit)
    written = [place for place in known if place[0] in gather.residents.kept and place not in moved]
    everyone = [json.loads(each) for each in _all_gather_text(gather, json.dumps([moved, written]))]
    if not any(of_one for each in everyone for of_one in each):
        return
    of_first = [(index, slot) for places in everyone[0] for index, slot in places]
    values = values_of([(known[place], place[1]) for place in of_first])
    with gather.updating():
        gather.ranks.barrier("rank 0's parameters are handed out, whose shards none may read meanwhile")
        assert gather.under_way is not None
        gather.under_way.is_writing = True
        indices = list(dict.fromkeys(index for index, _ in of_first))
        before = {index: _copy_of_shard(trained[index]) for index in indices if index in trained}
        for (index, slot), here in zip(of_first, values, strict=True):
            buffer = known[index, slot]
            value = here if gather.ranks.rank == 0 else _room_for(buffer, slot)
            gather.ranks.broadcast_values(value, f"parameter '{gather.all[index].members[slot].name}'")
            buffer.put(slot, value)
        for index in indices:
            gather.residents.publish(index)
        for index, shard in before.items():
            _take_into_master(trained[index], shard)
        del values
        gather.residents.let_kept_go()
    for index, slot in dict.fromkeys((index, slot) for each in everyone for index, slot in each[0]):
        buffer = known[index, slot]
        if not buffer.is_at_home(slot) and not in_shared_memory(buffer.params[slot]):
            buffer.params[slot].data = buffer.own_home(slot)
        give_out([(buffer, slot)])


def _all_gather_text(gather: Residency, text: str) -> list[str]:
    """By rank. Ranks that refuse are heard first."""
    gather.ranks.check_same([])
    return gather.ranks.all_gather_text(text)


def _room_for(buffer: ShardedBuffer, slot: int) -> torch.Tensor:
    """The home itself would be fetched."""
    return torch.empty_strided(
        buffer.shapes[slot], buffer.strides[slot], dtype=buffer.flat.dtype, device=buffer.flat.device
    )


def _copy_of_shard(bucket: Bucket) -> torch.Tensor | None:
    """Of the parameters, where a master has to follow them."""
    return None if bucket.master is None else bucket.param_shard.clone()


def _take_into_master(bucket: Bucket, before: torch.Tensor | None) -> None:
    """Where the shard is not as ``before``: the rest of a master belonged to another value."""
    if bucket.master is None or before is None:
        return
    shard, values = bucket.param_shard, bucket.master.values
    changed = before.view(torch.int16) != shard.view(torch.int16)
    if bucket.master.spec == REMAINDER:
        values.masked_fill_(changed, 0)
    else:
        values.copy_(torch.where(changed | (values.to(shard.dtype) != shard), shard.to(values.dtype), values))
