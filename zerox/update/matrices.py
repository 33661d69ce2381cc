"""The update of parameters that lie whole on this rank, matrix by matrix: Muon's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox import _torch
from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket
from zerox.memory.forms import follow_, master_of, remainder_of, split_param
from zerox.plan.span import Span
from zerox.rules.muon import MUON, Matrix, in_runs, rate
from zerox.rules.of_groups import Rules
from zerox.update.momentum import Momentum, average
from zerox.update.newton_schulz import Iteration, bytes_of, orthogonalize
from zerox.update.together import copy_apart, joined, together, wide

CHECKED = ("maximize", *(name for name in MUON.defaults if name != "lr"))  # what users may change between steps
AT_ONCE = 2**24  # elements whose products are made together on an accelerator: these take longer than their launches
PIECE = 2**18  # elements that all other arithmetic takes at a time, on a CPU: its temporaries stay in the cache
PIECE_OF_DEVICE = 2**21  # on an accelerator, where each operator is a launch
PIECE_BYTES = 32  # of an element of a piece: temporaries, most where a master is a remainder
JOINED_BYTES = 6  # of an element, where several tensors go together: a parameter, its remainder and its direction

Kind = tuple[Iteration, torch.Size, tuple[int, ...]]  # matrices of one kind go together


class Own(NamedTuple):
    """A parameter of this rank, or slices of one from its element ``param_start`` on: elements ``[start, stop)`` of
    its bucket's shard. ``number``: of all parameters. ``runs``: its matrices, as in_runs() has them. ``segments``: for
    kernels, by first and last element."""

    bucket: Bucket
    row: int
    number: int
    param_start: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    group: int
    runs: list[tuple[Span, list[Matrix]]]
    segments: dict[tuple[int, int], Tensor]

    def elements(self, span: Span) -> slice:
        """Of the shard."""
        return slice(self.start + span.start, self.start + span.stop)

    def segments_of(self, span: Span) -> Tensor:
        """These of its elements, for a kernel. They are made once: an accelerator is waited for."""
        key = span.start, span.stop
        if key not in self.segments:
            row = [0, span.numel, 0, self.number, self.param_start + span.start]
            self.segments[key] = torch.tensor([row], dtype=torch.int64, device=self.bucket.device)
        return self.segments[key]


class Due(NamedTuple):
    """Matrices of one of them, which has a gradient: the ``span`` of its elements in memory, and the gradient of these,
    for which ``clamp`` is to be called."""

    own: Own
    span: Span
    matrices: Sequence[Matrix]
    grad: Tensor
    clamp: Callable[[Tensor], Tensor]

    def view(self, matrix: Matrix, values: Tensor) -> Tensor:
        """One of its matrices in ``values`` ``[span.numel]``."""
        start = matrix.start(self.own.strides) - self.span.start
        return values[start:].as_strided((matrix.rows.numel, matrix.columns), self.own.strides[-2:])


class GradPiece(NamedTuple):
    """Elements ``[start, stop)`` of what is due, and where their direction goes."""

    due: Due
    start: int
    stop: int
    direction: Tensor

    def momentum(self) -> Momentum:
        own, span = self.due.own, Span(self.due.span.start + self.start, self.due.span.start + self.stop)
        stored = own.bucket.state["momentum_buffer"].part(own.elements(span))
        segments = None if stored.is_wide else own.segments_of(span)
        return Momentum(stored, segments, own.bucket.steps[own.row : own.row + 1])


class By(NamedTuple):
    """``param = keep * param + alpha * direction``, for parameters of one form."""

    keep: float
    alpha: float
    dtype: torch.dtype
    of_master: torch.dtype | None = None

    @property
    def is_split(self) -> bool:
        """The master is a remainder."""
        return self.of_master == torch.int16


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
        self.owned.clear()  # matrices may be cut otherwise

    def update(self, run: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """One step of these buckets. The host waits for the device, to learn which parameters have gradients."""
        due = sorted(self._due(run, groups), key=lambda each: (each.own.group, each.own.shape, each.own.strides))
        rates = {index: float(groups[index]["lr"]) for index in {each.own.group for each in due}}  # which may wait
        scale = self.grad_scale.remaining_factor(run[0])  # they have one divisor
        most = _numel_at_once(self.grads.ranks.device.type == "cpu")
        for _, some in together(((0, each.grad.numel(), each) for each in due), most):
            for by, places, directions in _begun(some, groups, scale):
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
            bucket, owned = self.buckets[index], self._owned(index, groups)
            for part in parts:
                clamp = partial(self.grad_scale.clamp, bucket=index)
                for row in range(part.first_row, part.first_row + part.segments.shape[0]):
                    own = owned[row]
                    if has_gradient[first_of_bucket + row] and own.stop > own.start:
                        grad = part.grad[own.start - part.start : own.stop - part.start]
                        for span, matrices in own.runs:
                            yield Due(own, span, matrices, grad[span.start : span.stop], clamp)
            bucket.steps += present
            first_of_bucket += len(owned)

    def _owned(self, index: int, groups: Sequence[Mapping[str, Any]]) -> list[Own]:
        if index not in self.owned:
            bucket = self.buckets[index]
            self.owned[index] = [_own(bucket, row, groups) for row in range(len(bucket.own_segments))]
        return self.owned[index]


def _own(bucket: Bucket, row: int, groups: Sequence[Mapping[str, Any]]) -> Own:
    segment = bucket.own_segments[row]
    slot, span, first = segment.slot, segment.span, segment.param_start
    member, shape, strides = bucket.members[slot], tuple(bucket.buffer.shapes[slot]), bucket.buffer.strides[slot]
    if (slices := bucket.plan.layout.slices) is not None:
        shape = slices[bucket.rank], *shape[1:]
    assert span.numel == math.prod(shape), f"'{member.name}' does not lie whole on this rank"
    runs = list(in_runs(shape, strides, groups[member.group]))
    return Own(bucket, row, member.number, first, span.start, span.stop, shape, strides, member.group, runs, {})


def _numel_at_once(on_host: bool) -> int:
    return 0 if on_host else AT_ONCE


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
    if on_host:
        return most
    joined = 2 * min(total, AT_ONCE) + (PIECE_BYTES + JOINED_BYTES) * min(total, PIECE_OF_DEVICE)
    return max(most, joined, 8 * min(total, AT_ONCE))  # also a batch of zeros, in _is_alike_in_batch()


def _begun(due: Sequence[Due], groups: Sequence[Mapping[str, Any]], scale: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """After the momentum took the gradients, by kind: how matrices are made orthogonal, which, and their directions in
    a list that nothing else refers to."""
    flat = [torch.empty(each.span.numel, dtype=torch.bfloat16, device=each.grad.device) for each in due]
    for (index, *_), some in together(_grad_pieces(due, flat), _piece_numel(flat[0].is_cpu)):
        take_gradients(some, groups[index], scale)
        del some
    kinds: dict[Kind, tuple[list[tuple[Due, Matrix]], list[Tensor]]] = {}
    for each in due:
        group = groups[each.own.group]
        by = Iteration(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        for matrix, direction in zip(each.matrices, _apart(each, flat.pop(0)), strict=True):
            places, directions = kinds.setdefault((by, direction.shape, direction.stride()), ([], []))
            places.append((each, matrix))
            directions.append(direction)
        del direction
    for (by, *_), (places, directions) in kinds.items():
        yield by, places, directions


def _apart(due: Due, direction: Tensor) -> list[Tensor]:
    """Of each matrix, in memory of its own."""
    views = [due.view(matrix, direction) for matrix in due.matrices]
    return views if len(views) == 1 else [view.to(view.dtype, copy=True) for view in views]


def _grad_pieces(due: Sequence[Due], flat: Sequence[Tensor]) -> Iterator[tuple[tuple[Any, ...], int, GradPiece]]:
    for each, direction in zip(due, flat, strict=True):
        most = _piece_numel(direction.is_cpu)
        key = each.own.group, each.grad.dtype, each.own.bucket.state["momentum_buffer"].values.dtype
        for start in range(0, each.span.numel, most):
            stop = min(start + most, each.span.numel)
            yield key, stop - start, GradPiece(each, start, stop, direction[start:stop])


def take_gradients(pieces: Sequence[GradPiece], group: Mapping[str, Any], scale: Tensor | None) -> None:
    """The momentum of these elements, which are of one param group, and their directions: in the momentum's precision,
    and then rounded."""
    momenta = [piece.momentum() for piece in pieces]
    grads = wide([each.due.clamp(each.due.grad[each.start : each.stop]) for each in pieces], momenta[0].stored.wide)
    if scale is not None:
        grads = _torch.for_each("mul", grads, scale.to(grads[0].dtype))
    averages = average(momenta, grads, group["momentum"])
    directions = _torch.for_each("lerp", grads, averages, group["momentum"]) if group["nesterov"] else averages
    _torch.for_each("copy_", [each.direction for each in pieces], directions)


def _end(
    places: Sequence[tuple[Due, Matrix]],
    orthogonal: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    rates: Mapping[int, float],
) -> None:
    """The parameters with their masters. ``rates``: a tensor counts as the number that it is, as in the kernels."""
    pieces = _param_pieces(places, orthogonal, groups, rates)
    for by, some in together(pieces, _piece_numel(orthogonal[0].is_cpu)):
        _move(some, by)


def _param_pieces(
    places: Sequence[tuple[Due, Matrix]],
    orthogonal: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    rates: Mapping[int, float],
) -> Iterator[tuple[By, int, tuple[Tensor, ...]]]:
    """Of a direction, its parameter, and the master if it has one."""
    for (due, matrix), direction in zip(places, orthogonal, strict=True):
        own, group = due.own, groups[due.own.group]
        keep = 1 - rates[own.group] * group["weight_decay"]
        alpha = -rate(rates[own.group], group["adjust_lr_fn"], matrix.rows.numel, matrix.columns)
        shards = own.bucket.param_shard, *([] if own.bucket.master is None else [own.bucket.master.values])
        by = By(keep, alpha, *(shard.dtype for shard in shards))
        views = [due.view(matrix, shard[own.elements(due.span)]) for shard in shards]
        for piece in _pieces(direction, *views):
            yield by, piece[0].numel(), piece


def _pieces(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of each the same elements, few at a time, which lie together in the last one."""
    last, most = matrices[-1], _piece_numel(matrices[-1].is_cpu)
    if last.numel() <= most:
        yield matrices
        return
    by_columns = last.stride(0) < last.stride(1)
    laid = [each.mT if by_columns else each for each in matrices]
    rows = max(1, most // laid[0].shape[1])
    for some in zip(*(each.split(rows) for each in laid), strict=True):
        yield from zip(*(each.split(most, 1) for each in some), strict=True)


def _move(pieces: Sequence[tuple[Tensor, ...]], by: By) -> None:
    """Parameters, with their masters, by their directions."""
    directions, params, *more = (list(each) for each in zip(*pieces, strict=True))
    if by.dtype.itemsize > 2:
        _torch.for_each("mul_", params, by.keep)
        _torch.for_each("add_", params, wide(directions, by.dtype), alpha=by.alpha)
        return
    [masters] = more or [[]]
    values = _values(joined(params), joined(masters) if masters else None, by.is_split)
    values.mul_(by.keep).add_(joined(directions), alpha=by.alpha)
    _put_back(values, params, masters, by.is_split)


def _values(param: Tensor, master: Tensor | None, is_split: bool) -> Tensor:
    """16-bit parameters in 32 bits: their masters, or a copy."""
    if master is None:
        return param.float()
    if is_split:
        return master_of(param, master)
    follow_(master, param)
    return master


def _put_back(values: Tensor, params: Sequence[Tensor], masters: Sequence[Tensor], is_split: bool) -> None:
    if is_split:
        param = split_param(values)
        copy_apart(param, params)
        copy_apart(remainder_of(param, values), masters)
        return
    copy_apart(values, params)
    if masters and values is not masters[0]:
        copy_apart(values, masters)
