"""Weights that ranks have read, each its parts: to all who need them, and into what is kept beside parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerox import _C as C
from zerox.checkpoint.weight_parts import Weight
from zerox.memory.bucket import Bucket, Member
from zerox.memory.flat import FlatBuffer, ShardedBuffer, give_out, in_shared_memory
from zerox.memory.row_table import RowTable
from zerox.model_names import quote
from zerox.optimizer.core import Core
from zerox.ranks.axes import Axis
from zerox.ranks.dtensors import local_of
from zerox.ranks.group import CPU, Ranks
from zerox.residency.residency import Residency
from zerox.rules.rule import REMAINDER
from zerox.state.row_state import fill_master

ROWS_AT_A_TIME = 2**16

Place = tuple[FlatBuffer, int, Member]


def _places(core: Core, loaded: Sequence[Weight]) -> Iterator[Place]:
    """Where those of the parameters lie that have a bucket."""
    wanted = {id(weight.tensor) for weight in loaded}
    buffers: dict[int, tuple[FlatBuffer, Sequence[Member]]] = {
        id(bucket.buffer): (bucket.buffer, bucket.members) for bucket in core.buckets
    }
    for _, members, buffer in core.gather.all if isinstance(core.gather, Residency) else ():
        if isinstance(buffer, ShardedBuffer):
            buffers[id(buffer)] = buffer, members
    for found, its in buffers.values():
        for slot, member in enumerate(its):
            if id(member.param) in wanted:
                yield found, slot, member


def check_homes(core: Core, loaded: Sequence[Weight]) -> None:
    """ValueError for a parameter that no longer is what it was when the optimizer was built, or that can't be
    written."""
    for buffer, slot, member in _places(core, loaded):
        if not buffer.is_at_home(slot) and (misfit := buffer.misfit(slot, member.name)):
            raise ValueError(misfit)
    for weight in loaded:
        local = local_of(weight.tensor)
        if local.is_meta or local.layout is not torch.strided:
            raise ValueError(f"'{weight.names[0]}' of the model is {_what(local)}, and has no memory to load into")
        if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
            raise ValueError(
                f"'{weight.names[0]}' of the model is expanded: several of its elements are one in memory. Make it "
                "contiguous()"
            )


def _what(tensor: Tensor) -> str:
    return "on the meta device" if tensor.is_meta else f"of {tensor.layout}"


def bring_home(core: Core, loaded: Sequence[Weight]) -> None:
    """Parameters that were given other memory lie in their buckets again: their old values go."""
    for buffer, slot, _ in _places(core, loaded):
        param = buffer.params[slot]
        if not buffer.is_at_home(slot) and not in_shared_memory(param):
            param.data = buffer.own_home(slot)


def give_out_loaded(core: Core, loaded: Sequence[Weight]) -> None:
    """Parameters in shared memory follow. All that was loaded counts as written."""
    give_out([(buffer, slot) for buffer, slot, _ in _places(core, loaded)])
    for weight in loaded:
        torch.autograd.graph.increment_version(weight.tensor)


def share_loaded(core: Core, loaded: Sequence[Weight]) -> None:
    """Inside the gather's updating(), once each rank has read its parts. Collective."""
    wanted = {id(weight.tensor) for weight in loaded}
    held = {id(member.param) for bucket in core.buckets for member in bucket.members}
    for bucket in core.buckets:
        model = core.grads.model
        model.broadcast_values(bucket.param_shard, model.replicated_over(bucket.members[0].param))
        _follow(bucket, wanted)
    if isinstance(core.gather, Residency):
        held |= _share_frozen(core, core.gather)
    for table in core.tables:
        held.add(id(table.param))
        if id(table.param) in wanted:
            _share_table(core, table)
    _share_loose(core, [weight for weight in loaded if id(weight.tensor) not in held])
    for index in range(len(core.buckets)):
        core.gather.start(index)
    core.gather.wait()


def _follow(bucket: Bucket, wanted: set[int]) -> None:
    """What is kept beside values, in this rank's shard: a mask holds, and a master begins from what was loaded."""
    if bucket.mask is not None:
        bucket.param_shard.masked_fill_(~bucket.mask.kept(), 0)
    if bucket.master is None:
        return
    for segment in bucket.own_segments:
        if id(bucket.members[segment.slot].param) in wanted:
            own = slice(segment.span.start, segment.span.stop)
            master = bucket.master.values[own]
            if bucket.master.spec == REMAINDER:
                master.zero_()
            else:
                master.copy_(bucket.param_shard[own])


def _share_frozen(core: Core, gather: Residency) -> set[int]:
    """Of sharded buckets that nobody trains: to ranks of the model's axes that have the same, and between ranks that
    differ in the replicate axis, which have read a shard each of what all of them keep. Returns their parameters, by
    id."""
    trained = {id(bucket.buffer) for bucket in core.buckets}
    found = set()
    for _, members, buffer in gather.all:
        if isinstance(buffer, ShardedBuffer) and id(buffer) not in trained:
            found |= {id(member.param) for member in members}
            model = core.grads.model
            model.broadcast_values(
                buffer.shard(core.ranks.shard_of(core.ranks.rank)), model.replicated_over(members[0].param)
            )
            for axis in core.ranks.on_mesh[1:]:
                _gather_along(core.ranks, axis, buffer)
    return found


def _gather_along(ranks: Ranks, axis: Axis, buffer: ShardedBuffer) -> None:
    """The shards that lie together, in the order of the axis."""
    assert axis.group is not None
    own = buffer.shard(ranks.shard_of(ranks.rank))
    sent = (own.cpu() if ranks.via_host else own).contiguous().view(torch.uint8)
    received = [torch.empty_like(sent) for _ in axis.members]
    ranks.await_work(C.start_all_gather(axis.group, received, sent))
    for each, shard in zip(received, buffer.own.chunk(len(received)), strict=True):
        shard.copy_(each.view(own.dtype))


def _share_table(core: Core, table: RowTable) -> None:
    """Rows from their owners to all, or where they are sharded to whoever looks them up."""
    ranks, model = core.ranks, core.grads.model
    over = model.replicated_over(table.param)
    if table.own is not None:
        model.broadcast_values(table.own, over)
        core.gather.publish_tables([(table, torch.arange(table.own_rows.numel(), device=CPU))])
    else:
        whole = table.param.detach()
        for owner in range(ranks.size):
            for rows in table.owners.rows_of(owner).split(ROWS_AT_A_TIME):
                values = whole[rows]
                ranks.broadcast(
                    values.view(torch.uint8), f"rows of parameter {quote(table.member.name, table.param)}", owner
                )
                if owner != ranks.rank:
                    whole[rows] = values
        model.broadcast_values(whole, over)
    fill_master(table, {})


def _share_loose(core: Core, loaded: Sequence[Weight]) -> None:
    """What the first rank has read alone: buffers, and parameters that lie in no bucket."""
    ranks, model, subgroups = core.ranks, core.grads.model, core.grads.subgroups
    of_param = {id(member.param): subgroups.of_group[member.group].ranks for member in core.frozen}
    for weight in loaded:
        local, what = local_of(weight.tensor), f"'{weight.names[0]}'"
        of_param.get(id(weight.tensor), ranks).broadcast_values(local, what)
        model.broadcast_values(local, model.replicated_over(weight.tensor))
