"""The update of parameters that lie whole on this rank, matrix by matrix: Muon's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket
from zerox.memory.forms import follow_, master_of, remainder_of, split_param
from zerox.rules.muon import MUON, Matrix, matrices_of, rate
from zerox.rules.of_groups import Rules
from zerox.rules.rule import MASTER
from zerox.update.momentum import average
from zerox.update.newton_schulz import Iteration, orthogonalize

CHECKED = ("maximize", *(name for name in MUON.defaults if name != "lr"))  # what users may change between steps
AT_ONCE = 2**26  # elements whose directions are there at a time, in 2 bytes each


class Own(NamedTuple):
    """A parameter of this rank: elements ``[start, stop)`` of its bucket's shard. ``number``: of all parameters."""

    bucket: Bucket
    row: int
    number: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    group: int

    def shaped(self, values: Tensor) -> Tensor:
        """A view of its elements, 1-D in memory order, in its shape."""
        return values.as_strided(self.shape, self.strides)

    def part(self, shard: Tensor) -> Tensor:
        return shard[self.start : self.stop]


class Due(NamedTuple):
    """One of them that has a gradient, 1-D in memory order."""

    own: Own
    grad: Tensor
    scale: Tensor | None


class Begun(NamedTuple):
    """A matrix of the parameter at this ``place`` among those that are updated together."""

    place: int
    matrix: Matrix
    by: Iteration
    direction: Tensor


class MatrixUpdate:
    """``buckets``: the core's own list, which grows."""

    def __init__(self, rules: Rules, buckets: Sequence[Bucket], grads: Grads, grad_scale: GradScale) -> None:
        self.rules = rules
        self.buckets = buckets
        self.grads = grads
        self.grad_scale = grad_scale
        self.owned: dict[int, list[Own]] = {}  # by bucket, one for each row
        self.checked: list[dict[str, Any]] = []

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Before anything is updated: raises as the constructor, on all ranks, for options that were changed since."""
        own = [group for group in groups if self.rules.of(group) is MUON]
        options = [{name: group.get(name) for name in CHECKED} for group in own]
        if options == self.checked:
            return
        for group in own:
            MUON.check(group)
        self.checked = options

    def update(self, run: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """One step of these buckets. The host waits for the device, to learn which parameters have gradients."""
        due = sorted(self._due(run), key=lambda each: (each.own.group, each.own.shape, each.own.strides))
        for some in _at_most(due, AT_ONCE):
            update(some, groups)

    def regroup(self) -> None:
        """Parameters are in other groups."""
        self.owned.clear()

    def _due(self, run: Sequence[int]) -> Iterator[Due]:
        parts_of = [self.grads.parts(index) for index in run]  # first: whole gradients are looked at here
        presents = [self.grad_scale.present(self.grads.present(index)) for index in run]
        has_gradient = torch.cat(presents).tolist()
        first_of_bucket = 0
        for index, parts, present in zip(run, parts_of, presents, strict=True):
            bucket, owned = self.buckets[index], self._owned(index)
            for part in parts:
                clamped, scale = self.grad_scale.clamp(part, index), self.grad_scale.remaining_factor(index)
                for row in range(part.first_row, part.first_row + part.segments.shape[0]):
                    own = owned[row]
                    if has_gradient[first_of_bucket + row] and own.stop > own.start:
                        grad = clamped.grad[own.start - part.start : own.stop - part.start]
                        yield Due(own, grad, scale)
            bucket.steps += present
            first_of_bucket += len(owned)

    def _owned(self, index: int) -> list[Own]:
        if index not in self.owned:
            bucket = self.buckets[index]
            self.owned[index] = [_own(bucket, row) for row in range(len(bucket.own_segments))]
        return self.owned[index]


def _own(bucket: Bucket, row: int) -> Own:
    slot, span = bucket.own_segments[row].slot, bucket.own_segments[row].span
    member, shape, strides = bucket.members[slot], tuple(bucket.buffer.shapes[slot]), bucket.buffer.strides[slot]
    assert span.numel == math.prod(shape), f"'{member.name}' does not lie whole on this rank"
    return Own(bucket, row, member.number, span.start, span.stop, shape, strides, member.group)


def _at_most(due: Sequence[Due], numel: int) -> Iterator[list[Due]]:
    """In runs of at most so many elements, or one."""
    run: list[Due] = []
    total = 0
    for each in due:
        if run and total + each.grad.numel() > numel:
            yield run
            run, total = [], 0
        run.append(each)
        total += each.grad.numel()
    if run:
        yield run


def update(due: Sequence[Due], groups: Sequence[Mapping[str, Any]]) -> None:
    """Momentum, Newton-Schulz of equal matrices together, and the parameters with their masters."""
    rates = {index: float(groups[index]["lr"]) for index in {each.own.group for each in due}}  # which may wait
    inside: list[Begun] = []
    for place, each in enumerate(due):
        group = groups[each.own.group]
        by = Iteration(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        direction = each.own.shaped(_direction(each, group))
        for matrix in matrices_of(each.own.shape, group):
            inside.append(Begun(place, matrix, by, matrix.of(direction).to(torch.bfloat16, copy=True)))
    found: list[list[tuple[Matrix, Tensor]]] = [[] for _ in due]
    for (by, *_), alike in groupby(sorted(inside, key=_kind), key=_kind):
        places, matrices, _, directions = zip(*alike, strict=True)
        for place, matrix, direction in zip(places, matrices, orthogonalize(directions, by), strict=True):
            found[place].append((matrix, direction))
    for each, orthogonal in zip(due, found, strict=True):
        _apply(each.own, orthogonal, groups[each.own.group], rates[each.own.group])


def _kind(begun: Begun) -> tuple[Any, ...]:
    """Those of one kind go together."""
    return begun.by, tuple(begun.direction.shape), begun.direction.stride()


def _direction(due: Due, group: Mapping[str, Any]) -> Tensor:
    """After the momentum took the gradient: what is made orthogonal, in the momentum's precision, 1-D."""
    own = due.own
    stored = own.bucket.state["momentum_buffer"].part(slice(own.start, own.stop))
    grad = due.grad.to(stored.wide)
    if due.scale is not None:
        grad = grad * due.scale
    momentum = average(stored, grad, group["momentum"], own.number, own.bucket.steps[own.row : own.row + 1])
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _apply(own: Own, orthogonal: Sequence[tuple[Matrix, Tensor]], group: Mapping[str, Any], lr: float) -> None:
    """``lr``: a tensor counts as the number that it is, as in the kernels."""
    param = own.part(own.bucket.param_shard)
    master = None if own.bucket.master is None else own.part(own.bucket.master.values)
    values = _values(param, master, own.bucket)
    shaped = own.shaped(values)
    for matrix, direction in orthogonal:
        part = matrix.of(shaped)
        part.mul_(1 - lr * group["weight_decay"])
        part.add_(direction, alpha=-rate(lr, group["adjust_lr_fn"], *part.shape))
    _put_back(values, param, master, own.bucket)


def _values(param: Tensor, master: Tensor | None, bucket: Bucket) -> Tensor:
    """The parameter in 32 bits or more: itself, its master, or a copy."""
    if param.itemsize > 2:
        return param
    if master is None:
        return param.float()
    if MASTER.key not in bucket.state:
        return master_of(param, master)
    follow_(master, param)
    return master


def _put_back(values: Tensor, param: Tensor, master: Tensor | None, bucket: Bucket) -> None:
    if param.itemsize > 2:
        return
    if master is not None and MASTER.key not in bucket.state:
        param.copy_(split_param(values))
        master.copy_(remainder_of(param, values))
    else:
        param.copy_(values)
