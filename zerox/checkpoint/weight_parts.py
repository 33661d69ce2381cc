"""A model's weights as rectangles: which part of each this rank reads from files, or writes into them.

Over all ranks that have a weight, its parts have each of its elements once: so each byte is read, or written, once.
With sharded parameters a part lies in what this rank keeps; with whole ones it is the shard of which this rank has the
state. What no rank has a shard of (buffers, and parameters that nobody trains) is the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerox.checkpoint.names import EXTRA_STATE, naming_in
from zerox.engine import Engine
from zerox.memory.bucket import Member
from zerox.memory.flat import FlatBuffer, ShardedBuffer
from zerox.memory.row_table import RowTable
from zerox.model_names import models_with
from zerox.optimizer.core import Core
from zerox.plan.rectangles import rectangles
from zerox.plan.span import Span
from zerox.ranks.dtensors import cut_of, local_of
from zerox.ranks.holders import holders_of
from zerox.residency.residency import Residency


class Part(NamedTuple):
    """A rectangle of a whole tensor, from ``offsets`` on and of ``sizes``, and its ``values`` on this rank: a view."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor


class Weight(NamedTuple):
    """A parameter or a persistent buffer. ``names``: all that the model has for it, in the order of its state_dict().
    ``tensor``: what the model has, on this rank. ``parts``: this rank's."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]
    tensor: Tensor


PartsOf = Callable[[], list[Part]]


def model_of(optimizer: Engine) -> nn.Module:
    """The model whose parameters the optimizer has. ValueError if it was not given one, and there is none or several
    that have all of them."""
    if (given := optimizer.inside.model_given) is not None:
        return given
    params = [member.param for member in optimizer.inside.members]
    found = models_with(params)
    if len(found) > 1 and len({_described(model) for model in found}) == 1:
        return found[0]  # wrappers around one model
    if len(found) != 1:
        kinds = f" ({', '.join(sorted({type(model).__name__ for model in found}))})" if found else ""
        count = f"{len(found)} models that live have" if found else "no model that lives has"
        raise ValueError(
            f"{count}{kinds} all parameters of this optimizer, and names in files are the model's: build the optimizer "
            "with model=model"
        )
    return found[0]


def _described(model: nn.Module) -> tuple[tuple[str, int], ...]:
    bare = naming_in(model)
    return tuple((bare(name), id(each)) for name, each in _tensors_of(model).items())


def weights_of(optimizer: Engine, model: nn.Module, at_home: bool = False) -> list[Weight]:
    """All weights of ``model`` in the order of its state_dict(), the same on all ranks, each with this rank's parts.

    To be called where ranks have synchronized. A weight that some other optimizer of zerox holds is left out: see
    held_by_others(). ``at_home``: parts lie in the shards also of parameters that were given other memory since, for
    who brings these home; else in what the parameter is now. ValueError for a tensor of state_dict() that is neither a
    parameter nor a buffer, and for a DTensor that lies on axes which the optimizer does not know.
    """
    core = optimizer.inside
    of_params = _parts_by_param(core, at_home)
    others = _held_elsewhere(core, model)
    bare, tensors = naming_in(model), _tensors_of(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in others:
            names.setdefault(id(tensor), []).append(bare(name))
    by_id = {id(tensor): tensor for tensor in tensors.values()}
    found = []
    for number, of_tensor in names.items():
        tensor = by_id[number]
        make = of_params.get(number)
        parts = _loose(core, of_tensor[0], tensor) if make is None else make()
        found.append(Weight(tuple(of_tensor), tuple(tensor.shape), tensor.dtype, parts, tensor))
    return found


def held_by_others(optimizer: Engine, model: nn.Module) -> set[str]:
    """Names in ``model`` of parameters that other optimizers of zerox have, and this one has not."""
    others, bare = _held_elsewhere(optimizer.inside, model), naming_in(model)
    return {bare(name) for name, tensor in _tensors_of(model).items() if id(tensor) in others}


def _held_elsewhere(core: Core, model: nn.Module) -> set[int]:
    own = {id(member.param) for member in core.members}
    others = {id(param) for param in model.parameters()} - own
    held = [{id(member.param) for member in each.inside.members} for each in holders_of(others)] if others else []
    return others & set().union(*held)


def _tensors_of(model: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by their names in state_dict(), as objects of the model."""
    known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.endswith(EXTRA_STATE) or not isinstance(value, Tensor):
            continue
        if name not in known:
            raise ValueError(
                f"model.state_dict() has '{name}', which is no parameter and no buffer of the model: a hook makes it "
                "of something that zerox does not know"
            )
        found[name] = known[name]
    return found


# ---- the parts of each kind


def _parts_by_param(core: Core, at_home: bool) -> dict[int, PartsOf]:
    """By id of each parameter that the optimizer has."""
    found: dict[int, PartsOf] = {}
    for bucket in core.buckets:
        found |= _of_buffer(core, bucket.buffer, bucket.members, bucket.rank, at_home)
    if isinstance(core.gather, Residency):
        trained = {id(bucket.buffer) for bucket in core.buckets}
        own_shard = core.ranks.shard_of(core.ranks.rank)
        for _, members, buffer in core.gather.all:
            if isinstance(buffer, ShardedBuffer) and id(buffer) not in trained:
                found |= _of_buffer(core, buffer, members, own_shard, at_home)
    for table in core.tables:
        found[id(table.param)] = _OfTable(core, table)
    for member in core.frozen:
        found.setdefault(id(member.param), _OfLoose(core, member))
    return found


def _of_buffer(
    core: Core, buffer: FlatBuffer, members: Sequence[Member], rank: int, at_home: bool
) -> dict[int, PartsOf]:
    """``rank``: whose shard of the bucket is this rank's."""
    found: dict[int, PartsOf] = {}
    shard = buffer.shard(rank)
    segments = {each.slot: each for each in buffer.layout.segments(rank)}
    for slot, member in enumerate(members):
        segment = segments.get(slot)
        is_ours = segment is not None and _counts(core, member.param)
        found[id(member.param)] = _OfSegment(
            buffer,
            slot,
            member.param,
            segment.param_start if segment is not None else 0,
            shard[segment.span.start : segment.span.stop] if segment is not None and is_ours else shard[:0],
            at_home or buffer.is_at_home(slot),
        )
    return found


@dataclass(frozen=True)
class _OfSegment:
    """Of the elements from ``start`` on, in memory order, of a parameter in a bucket: ``own``, 1-D, where they lie."""

    buffer: FlatBuffer
    slot: int
    param: Tensor
    start: int
    own: Tensor
    is_home: bool

    def __call__(self) -> list[Part]:
        shape, strides = self.buffer.shapes[self.slot], self.buffer.strides[self.slot]
        cut, found = cut_of(self.param), []
        for each in rectangles(shape, strides, Span(self.start, self.start + self.own.numel())):
            if self.is_home:
                first = self.own.storage_offset() + each.span.start - self.start
                values = self.own.as_strided(each.sizes, strides, first)
            else:
                inside = zip(each.offsets, each.sizes, strict=True)
                values = local_of(self.param).detach()[tuple(slice(at, at + size) for at, size in inside)]
            offsets = each.offsets if cut is None else cut.place_offsets(each.offsets)
            found.append(Part(offsets, each.sizes, values))
        return found


@dataclass(frozen=True)
class _OfTable:
    """Of the rows that this rank owns, which lie in blocks all over the table."""

    core: Core
    table: RowTable

    def __call__(self) -> list[Part]:
        table = self.table
        if not _counts(self.core, table.param):
            return []
        found = []
        for place, row, count in runs_of_rows(table.own_rows):
            whole = table.param.detach()
            values = whole[row : row + count] if table.own is None else table.own[place : place + count]
            found.append(Part((row, 0), (count, table.width), values))
        return found


@dataclass(frozen=True)
class _OfLoose:
    """Of a parameter that lies in no bucket: the first rank's of those that have the same."""

    core: Core
    member: Member

    def __call__(self) -> list[Part]:
        subgroup = self.core.grads.subgroups.of_group[self.member.group]
        is_first = subgroup.ranks.rank == 0 and _counts(self.core, self.member.param)
        return [_whole(self.member.param)] if is_first and self.member.local.numel() else []


def runs_of_rows(rows: Tensor) -> Iterator[tuple[int, int, int]]:
    """Of rows that ascend: where each run of neighbours begins among them, its first row, and how many it has."""
    if not rows.numel():
        return
    starts = [0, *((rows[1:] != rows[:-1] + 1).nonzero()[:, 0] + 1).tolist(), rows.numel()]
    for first, stop in pairwise(starts):
        yield first, int(rows[first]), stop - first


def _loose(core: Core, name: str, tensor: Tensor) -> list[Part]:
    """Of what the optimizer does not have."""
    if why := core.grads.model.missing(tensor):
        raise ValueError(f"'{name}' of the model {why}")
    is_first = core.ranks.rank == 0 and _counts(core, tensor)
    return [_whole(tensor)] if is_first and local_of(tensor).numel() else []


def _whole(tensor: Tensor) -> Part:
    local, cut = local_of(tensor).detach(), cut_of(tensor)
    return Part((0,) * local.dim() if cut is None else cut.offsets, tuple(local.shape), local)


def _counts(core: Core, tensor: Tensor) -> bool:
    """Whether this rank reads what is the same along axes of the model."""
    return core.grads.model.counts(core.grads.model.replicated_over(tensor))
