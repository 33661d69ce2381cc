"""Axes along which ranks have other parts of one model: tensor parallel, and any other that DTensors lie on.

The ranks of such an axis train with other data-parallel groups, and meet only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerox import _torch
from zerox.ranks.calls import waiting
from zerox.ranks.dtensors import is_dtensor, name_of_dim
from zerox.ranks.process_group import GroupArgument, choose_group

T = TypeVar("T")


@dataclass
class Given:
    """Collectives over an axis, and the bytes that this rank gave to them. The backend's algorithm decides how often
    these are sent. Objects, which are for construction and checkpoints, are not counted."""

    calls: int = 0
    nbytes: int = 0

    def note(self, nbytes: int) -> None:
        self.calls += 1
        self.nbytes += nbytes


@dataclass(frozen=True)
class ModelAxis:
    """The ranks that differ from this one along the axis only, as the default group numbers them, and their group.

    ``is_of_params``: DTensors lie on it. What is not cut along it, plain parameters too, is then the same on all of
    its ranks; else each has parameters of its own.
    """

    name: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    is_of_params: bool
    given: Given = field(default_factory=Given, compare=False)

    @property
    def coordinate(self) -> int:
        return self.ranks.index(dist.get_rank())

    def __str__(self) -> str:
        return f"{self.name} of ranks {list(self.ranks)}"

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, by coordinate. Collective."""
        found: list[Any] = [None] * len(self.ranks)
        _ask_along(self, partial(dist.all_gather_object, found, value, group=self.group))
        return found


@dataclass(frozen=True)
class ModelAxes:
    """``axes``: in the same order on all ranks."""

    axes: tuple[ModelAxis, ...] = ()

    def __str__(self) -> str:
        return " and ".join(f"the axis {axis}" for axis in self.axes) or "no model axis"

    def replicated_over(self, param: Tensor) -> tuple[int, ...]:
        """The axes, by position, along which a parameter is not cut, though others are."""
        cut = {axis.ranks for _, axis, placement in _lines(param) if placement.is_shard()}
        return tuple(i for i, axis in enumerate(self.axes) if axis.is_of_params and axis.ranks not in cut)

    def counts(self, replicated: Sequence[int]) -> bool:
        """Whether a norm counts on this rank what is the same along these axes."""
        return all(self.axes[index].coordinate == 0 for index in replicated)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first along all axes that DTensors lie on."""
        return all(axis.coordinate == 0 for axis in self.axes if axis.is_of_params)

    def dims_of(self, param: Tensor) -> dict[int, int]:
        """By dimension of a DTensor's mesh, the axis that it is; those of one rank are left out."""
        by_ranks = {axis.ranks: index for index, axis in enumerate(self.axes)}
        return {dim: by_ranks[axis.ranks] for dim, axis, _ in _lines(param)}

    @property
    def traffic_by_axis(self) -> list[tuple[int, int]]:
        """Collectives over each axis, and the bytes that this rank gave to them."""
        return [(axis.given.calls, axis.given.nbytes) for axis in self.axes]

    def missing(self, param: Tensor) -> str:
        """Why a parameter that was added can't be trained; empty if all its axes are known."""
        known = {axis.ranks for axis in self.axes if axis.is_of_params}
        lost = next((axis for _, axis, _ in _lines(param) if axis.ranks not in known), None)
        if lost is None:
            return ""
        return f"is a DTensor on the axis {lost}, where no parameter was when the optimizer was built: give it to that"

    def all_reduce(self, values: Tensor, largest: bool) -> None:
        """In place, over all axes. Collective."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        for axis in self.axes:
            sent = _to_send(values, axis.group)
            _ask_along(axis, partial(dist.all_reduce, sent, op, group=axis.group))
            axis.given.note(sent.nbytes)
            if sent is not values:
                values.copy_(sent)

    def broadcast(self, values: Tensor, along: Sequence[int]) -> None:
        """From the ranks of coordinate 0 on these axes, in place. Collective."""
        for axis in (self.axes[index] for index in along):
            sent = _to_send(values, axis.group)
            _ask_along(axis, partial(dist.broadcast, sent, axis.ranks[0], group=axis.group))
            axis.given.note(sent.nbytes if axis.coordinate == 0 else 0)
            if sent is not values:
                values.copy_(sent)

    def broadcast_values(self, tensor: Tensor, along: Sequence[int]) -> None:
        """The same with a tensor of any dtype and strides."""
        if along and tensor.numel() > 0:
            values = tensor.detach().contiguous()
            self.broadcast(values.reshape(-1).view(torch.uint8), along)
            tensor.detach().copy_(values)

    def all_gather(self, values: Tensor, along: int) -> list[Tensor]:
        """The values of all ranks of one axis, by coordinate. Collective."""
        axis = self.axes[along]
        sent = _to_send(values, axis.group)
        received = [torch.empty_like(sent) for _ in axis.ranks]
        _ask_along(axis, partial(dist.all_gather, received, sent, group=axis.group))
        axis.given.note(sent.nbytes)
        return [each.to(values.device) for each in received]

    def check_same(self, lines: Sequence[str], of_all: Sequence[str]) -> None:
        """ValueError on all ranks of an axis, naming the first of the lines that differs. ``of_all``: those that must
        agree too where each rank has parameters of its own. Collective."""
        described = [f"model axes of {[len(axis.ranks) for axis in self.axes]} ranks"]
        for axis in self.axes:
            own = [*described, *of_all, *(lines if axis.is_of_params else ())]
            everyone = axis.gather_objects(own)
            for rank, theirs in zip(axis.ranks, everyone, strict=True):
                for index in range(max(len(theirs), len(everyone[0]))):
                    first, other = (each[index] if index < len(each) else "nothing" for each in (everyone[0], theirs))
                    if first != other:
                        raise ValueError(
                            f"zerox: ranks must agree along axis {axis.name}: rank {axis.ranks[0]} has {first}; "
                            f"rank {rank} has {other}"
                        )


def find_axes(
    params: Sequence[Tensor], quote: Callable[[int], str], process_group: GroupArgument, norm_group: Any
) -> ModelAxes:
    """Those that DTensors among ``params`` lie on, and those of ``norm_group``. Nothing is sent.

    ``quote``: names a parameter in errors, by its position. Raises ValueError for an axis that has other ranks of the
    data-parallel group, or of another axis.
    """
    found: dict[tuple[int, ...], ModelAxis] = {}
    by_params: dict[tuple[int, ...], int] = {}  # the first that lies on it
    for index, param in enumerate(params):
        for _, axis, _ in _lines(param):
            if axis.ranks not in found:
                found[axis.ranks] = axis
                by_params[axis.ranks] = index
    for axis in axes_of(norm_group):
        found.setdefault(axis.ranks, axis)
    if not found:
        return ModelAxes()
    group = choose_group(process_group)

    def why(ranks: tuple[int, ...]) -> str:
        if ranks not in by_params:
            return f"norm_group has the axis {found[ranks]}"
        return f"parameter {quote(by_params[ranks])} is a DTensor on axis {found[ranks]}"

    here = dist.get_rank()
    averaged = [here] if group is None else dist.get_process_group_ranks(group)
    for ranks in found:
        if shared := sorted(set(ranks) & set(averaged) - {here}):
            raise ValueError(
                f"{why(ranks)}, and ranks {shared} of it average their gradients with rank {here}: pass the "
                'data-parallel axis of the mesh as process_group, as mesh["dp"]'
            )
        for other in found:
            if ranks != other and set(ranks) & set(other) != {here}:
                raise ValueError(f"{why(ranks)}, and {why(other)}: two axes may have only rank {here} in common")
    return ModelAxes(tuple(sorted(found.values(), key=lambda axis: (axis.ranks[1] - axis.ranks[0], len(axis.ranks)))))


def axes_of(norm_group: Any) -> list[ModelAxis]:
    """Those of several ranks. ValueError unless it is None, or a group or a mesh that has this rank."""
    if norm_group is None:
        return []
    if isinstance(norm_group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(norm_group))
        return [ModelAxis("norm_group", ranks, norm_group, False)] if len(ranks) > 1 else []
    if not isinstance(norm_group, DeviceMesh) or norm_group.get_coordinate() is None:
        raise ValueError(f"norm_group must be a ProcessGroup or a DeviceMesh that has this rank, got {norm_group!r}")
    return [
        ModelAxis(name_of_dim(norm_group, dim), ranks, norm_group.get_group(dim), False)
        for dim in range(norm_group.ndim)
        if len(ranks := _ranks_along(norm_group, dim)) > 1
    ]


def _lines(param: Any) -> list[tuple[int, ModelAxis, Any]]:
    """The axes of several ranks that a DTensor lies on: the dimension of its mesh, the axis, and how."""
    if not is_dtensor(param):
        return []
    mesh = param.device_mesh
    return [
        (dim, ModelAxis(name_of_dim(mesh, dim), ranks, mesh.get_group(dim), True), placement)
        for dim, placement in enumerate(param.placements)
        if len(ranks := _ranks_along(mesh, dim)) > 1
    ]


def _ranks_along(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    if mesh.size(dim) == 1:
        return (dist.get_rank(),)
    return tuple(dist.get_process_group_ranks(mesh.get_group(dim)))


def _to_send(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """On the host if the group does not move tensors of their device."""
    try:
        name = _torch.backend_of(group, values.device).name()
    except RuntimeError:
        name = ""
    return values.cpu() if name in ("", "gloo") and values.device.type != "cpu" else values


def _ask_along(axis: ModelAxis, send: Callable[[], T]) -> T:
    try:
        with waiting(axis.group, f"the other ranks of the model axis {axis}"):
            return send()
    except RuntimeError as error:
        raise RuntimeError(f"zerox: a rank of the model axis {axis} did not answer: {error}") from error
