"""The update of parameters that lie whole on this rank, matrix by matrix: Muon's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket
from zerox.memory.forms import follow_, master_of, remainder_of, split_param
from zerox.plan.span import Span
from zerox.rules.muon import MUON, Matrix, in_runs, rate
from zerox.rules.of_groups import Rules
from zerox.rules.rule import MASTER
from zerox.update.momentum import average
from zerox.update.newton_schulz import Iteration, bytes_of, orthogonalize

CHECKED = ("maximize", *(name for name in MUON.defaults if name != "lr"))  # what users may change between steps
AT_ONCE = 2**24  # elements whose products are made together on an accelerator: these take longer than their launches
PIECE = 2**18  # elements that all other arithmetic takes at a time, on a CPU: its temporaries stay in the cache
PIECE_OF_DEVICE = 2**22  # on an accelerator, where each operator is a launch
PIECE_BYTES = 32  # of an element of a piece: temporaries, most where a master is a remainder

Kind = tuple[Iteration, torch.Size, tuple[int, ...]]  # matrices of one kind go together


class Own(NamedTuple):
    """A parameter of this rank: elements ``[start, stop)`` of its bucket's shard. ``number``: of all parameters.
    ``segments``: for kernels, by first and last element."""

    bucket: Bucket
    row: int
    number: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    group: int
    segments: dict[tuple[int, int], Tensor]

    def elements(self, span: Span) -> slice:
        """Of the shard."""
        return slice(self.start + span.start, self.start + span.stop)

    def segments_of(self, span: Span) -> Tensor:
        """These of its elements, for a kernel. They are made once: an accelerator is waited for."""
        key = span.start, span.stop
        if key not in self.segments:
            row = [0, span.numel, 0, self.number, span.start]
            self.segments[key] = torch.tensor([row], dtype=torch.int64, device=self.bucket.device)
        return self.segments[key]


class Due(NamedTuple):
    """Matrices of one of them, which has a gradient: the ``span`` of its elements in memory, and the gradient of these.
    ``clamp`` is to be called first, then ``scale`` multiplies."""

    own: Own
    span: Span
    matrices: Sequence[Matrix]
    grad: Tensor
    clamp: Callable[[Tensor], Tensor]
    scale: Tensor | None

    def view(self, matrix: Matrix, values: Tensor) -> Tensor:
        """One of its matrices in ``values`` ``[span.numel]``."""
        start = matrix.start(self.own.strides) - self.span.start
        return values[start:].as_strided((matrix.rows.numel, matrix.columns), self.own.strides[-2:])


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
        due = sorted(self._due(run, groups), key=lambda each: (each.own.group, each.own.shape, each.own.strides))
        rates = {index: float(groups[index]["lr"]) for index in {each.own.group for each in due}}  # which may wait
        for some in _at_most(due, 0 if self.grads.ranks.device.type == "cpu" else AT_ONCE):
            for by, places, directions in _begun(some, groups):
                _end(places, orthogonalize(directions, by), groups, rates)

    def regroup(self) -> None:
        """Parameters are in other groups."""
        self.owned.clear()

    def _due(self, run: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> Iterator[Due]:
        parts_of = [self.grads.parts(index) for index in run]  # first: whole gradients are looked at here
        presents = [self.grad_scale.present(self.grads.present(index)) for index in run]
        has_gradient = torch.cat(presents).tolist()
        first_of_bucket = 0
        for index, parts, present in zip(run, parts_of, presents, strict=True):
            bucket, owned = self.buckets[index], self._owned(index)
            for part in parts:
                clamp, scale = partial(self.grad_scale.clamp, bucket=index), self.grad_scale.remaining_factor(index)
                for row in range(part.first_row, part.first_row + part.segments.shape[0]):
                    own = owned[row]
                    if has_gradient[first_of_bucket + row] and own.stop > own.start:
                        grad = part.grad[own.start - part.start : own.stop - part.start]
                        for span, matrices in in_runs(own.shape, own.strides, groups[own.group]):
                            yield Due(own, span, matrices, grad[span.start : span.stop], clamp, scale)
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
    return Own(bucket, row, member.number, span.start, span.stop, shape, strides, member.group, {})


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


def _piece_numel(on_host: bool) -> int:
    return PIECE if on_host else PIECE_OF_DEVICE


def most_bytes(params: Iterable[tuple[Sequence[int], Sequence[int], Mapping[str, Any]]], on_host: bool) -> int:
    """That are allocated at a time at the most, to update parameters of these shapes, strides and groups."""
    most = total = 0
    for shape, strides, group in params:
        for span, matrices in in_runs(shape, strides, group):
            directions = 2 * span.numel
            total += span.numel
            products = max(bytes_of(each.rows.numel, each.columns) - 2 * each.numel for each in matrices)
            copied = directions if len(matrices) > 1 else 0
            pieces = PIECE_BYTES * min(span.numel, _piece_numel(on_host))
            most = max(most, directions + max(products, copied, pieces))
    return most if on_host else max(most, 8 * min(total, AT_ONCE))  # also a batch of zeros, in _is_alike_in_batch()


def _begun(due: Sequence[Due], groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """After the momentum took the gradients, by kind: how matrices are made orthogonal, which, and their directions in
    a list that nothing else refers to."""
    kinds: dict[Kind, tuple[list[tuple[Due, Matrix]], list[Tensor]]] = {}
    for each in due:
        group = groups[each.own.group]
        by = Iteration(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        for matrix, direction in zip(each.matrices, directions_of(each, group), strict=True):
            kind = by, direction.shape, direction.stride()
            places, directions = kinds.setdefault(kind, ([], []))
            places.append((each, matrix))
            directions.append(direction)
        del direction
    for (by, *_), (places, directions) in kinds.items():
        yield by, places, directions


def directions_of(due: Due, group: Mapping[str, Any]) -> list[Tensor]:
    """bfloat16, of each matrix."""
    direction = torch.empty(due.span.numel, dtype=torch.bfloat16, device=due.grad.device)
    most = _piece_numel(direction.is_cpu)
    for start in range(0, due.span.numel, most):
        stop = min(start + most, due.span.numel)
        direction[start:stop] = _direction(due, start, stop, group)
    if len(due.matrices) == 1:
        return [due.view(due.matrices[0], direction)]
    return [due.view(matrix, direction).to(torch.bfloat16, copy=True) for matrix in due.matrices]


def _direction(due: Due, start: int, stop: int, group: Mapping[str, Any]) -> Tensor:
    """Of these of its elements, in the momentum's precision, once that has taken the gradient."""
    own, span = due.own, Span(due.span.start + start, due.span.start + stop)
    stored = own.bucket.state["momentum_buffer"].part(own.elements(span))
    grad = due.clamp(due.grad[start:stop]).to(stored.wide)
    if due.scale is not None:
        grad = grad * due.scale
    segments = None if stored.is_wide else own.segments_of(span)
    momentum = average(stored, grad, group["momentum"], segments, own.bucket.steps[own.row : own.row + 1])
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _end(
    places: Sequence[tuple[Due, Matrix]],
    orthogonal: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    rates: Mapping[int, float],
) -> None:
    """The parameters with their masters. ``rates``: a tensor counts as the number that it is, as in the kernels."""
    for (due, matrix), direction in zip(places, orthogonal, strict=True):
        own, group = due.own, groups[due.own.group]
        keep = 1 - rates[own.group] * group["weight_decay"]
        alpha = -rate(rates[own.group], group["adjust_lr_fn"], matrix.rows.numel, matrix.columns)
        kept = [own.bucket.param_shard] + ([] if own.bucket.master is None else [own.bucket.master.values])
        views = [due.view(matrix, shard[own.elements(due.span)]) for shard in kept]
        for of_direction, param, *master in _pieces(direction, *views):
            values = _values(param, master[0] if master else None, own.bucket)
            values.mul_(keep).add_(of_direction, alpha=alpha)
            _put_back(values, param, master[0] if master else None, own.bucket)


def _pieces(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of each the same elements, few at a time, which lie together in the last one."""
    last, most = matrices[-1], _piece_numel(matrices[-1].is_cpu)
    by_columns = last.stride(0) < last.stride(1)
    laid = [each.mT if by_columns else each for each in matrices]
    rows = max(1, most // laid[0].shape[1])
    for some in zip(*(each.split(rows) for each in laid), strict=True):
        yield from zip(*(each.split(most, 1) for each in some), strict=True)


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
