"""The axes of the ranks' mesh: one for a plain group, two for a mesh (replicate, shard)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerox import _C as C

OF_MODEL = ("tp", "sp", "pp", "ep", "tensor", "sequence", "pipe", "pipeline", "expert", "model")  # in names of axes


@dataclass(frozen=True)
class Axis:
    """``group``: zerox's own, over the ranks ``members``, in this order; those differ from each other along this axis
    only, and this rank is one of them. None for one rank alone. ``coordinates``: of all ranks, along this axis.
    """

    group: dist.ProcessGroup | None
    members: tuple[int, ...]
    coordinates: tuple[int, ...]

    @staticmethod
    def of_all(group: dist.ProcessGroup | None, size: int) -> Axis:
        return Axis(group, tuple(range(size)), tuple(range(size)))

    def for_manager(self, direct: bool, single_messages: bool, via_host: bool, neighbours: Sequence[int]) -> C.Axis:
        """``neighbours``: of all ranks, see :class:`zerox.ranks.group.Ranks`."""
        near = [neighbours[rank] for rank in self.members] if neighbours else []
        kind = C.ExchangeKind(direct=direct, single_messages=single_messages, via_host=via_host, neighbours=near)
        return C.Axis(group=self.group, kind=kind, members=self.members)


def shard_of(axes: Sequence[Axis], rank: int) -> int:
    """Which of a bucket's shards ``rank`` owns: see Note [Two levels] in csrc/exchange/two_level_exchange.h.

    ``axes``: the inner one first. Shards of ranks that differ in the outer axis only lie together.
    """
    index = 0
    for axis in axes:
        index = index * (max(axis.coordinates) + 1) + axis.coordinates[rank]
    return index


@dataclass(frozen=True)
class Grid:
    """A mesh (replicate, shard) with more than one rank on each axis.

    ``ranks``: their numbers in the default group, by row; ``outer`` and ``inner``: the mesh's groups over the axes
    replicate and shard that this rank is in.
    """

    ranks: tuple[tuple[int, ...], ...]
    outer: dist.ProcessGroup
    inner: dist.ProcessGroup

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.ranks), len(self.ranks[0])

    @property
    def all_ranks(self) -> list[int]:
        return sorted(rank for row in self.ranks for rank in row)

    def axis(self, index: int, rank: int, group: dist.ProcessGroup) -> Axis:
        """Axis 0 (replicate) or 1 (shard), as all_ranks numbers them. ``rank``: this one's number there."""
        numbers = {number: place for place, number in enumerate(self.all_ranks)}
        places = {numbers[each]: (r, c) for r, row in enumerate(self.ranks) for c, each in enumerate(row)}
        here = places[rank]
        line = [each for each in sorted(places) if places[each][1 - index] == here[1 - index]]
        return Axis(group, tuple(line), tuple(places[each][index] for each in range(len(places))))


def grid_of(mesh: DeviceMesh) -> Grid | None:
    """None for a mesh that is one line of ranks. Raises ValueError for one that zerox can't train on."""
    names = tuple(mesh.mesh_dim_names or ())
    if wrong := [name for name in names if mesh.ndim > 1 and any(part in OF_MODEL for part in name.split("_"))]:
        raise ValueError(
            f"process_group: gradients are averaged over all ranks of a mesh (replicate, shard), and this one has an "
            f"axis '{wrong[0]}': pass the data-parallel axes only, as mesh[\"dp\"]"
        )
    if mesh.ndim == 1 or 1 in mesh.shape:
        return None
    rows = [[int(rank) for rank in row] for row in mesh.mesh.tolist()]
    columns = [list(column) for column in zip(*rows, strict=True)]
    if any(line != sorted(line) for line in [*rows, *columns]):
        raise ValueError(
            f"process_group: the ranks of a mesh (replicate, shard) must ascend along both axes, got {rows}: make it "
            "with init_device_mesh()"
        )
    if names and "shard" in names[0] and "shard" not in names[1]:
        raise ValueError(
            f"process_group: the axes of a 2-D mesh are (replicate, shard), in this order, and this one has {names}"
        )
    return Grid(tuple(map(tuple, rows)), outer=mesh.get_group(0), inner=mesh.get_group(1))
