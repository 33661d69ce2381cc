"""The argument ``process_group``: which ranks train together, and whether one was asked to train alone."""

from __future__ import annotations

import datetime
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerox import _torch
from zerox.ranks.axes import Grid, grid_of
from zerox.ranks.forks import check_made_here

ALONE = "alone"
GroupArgument = dist.ProcessGroup | DeviceMesh | str | None


def choose_group(process_group: GroupArgument) -> dist.ProcessGroup | None:
    """The group that it stands for (by default all ranks); None for one rank without torch.distributed, or ``ALONE``.

    For a mesh (replicate, shard), all its ranks. Collective over these if they are not the default group's. Raises
    ValueError for a mesh that choose_grid() refuses, a group that this process is not in, and anything else;
    RuntimeError for a group of the process that this one was forked from.
    """
    if isinstance(process_group, DeviceMesh):
        grid = choose_grid(process_group)
        process_group = _line_of(process_group) if grid is None else _all_of(grid)
    if process_group == ALONE:
        return None
    if process_group is None:
        if not _is_initialized():
            return None
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a ProcessGroup this process is in, got {process_group!r} (a DeviceMesh of 1 "
            f'dimension, one of 2 (replicate, shard), and "{ALONE}" will do too)'
        )
    check_made_here(process_group)
    return process_group


def choose_grid(process_group: GroupArgument) -> Grid | None:
    """A mesh (replicate, shard) with several ranks on both axes; None for all else. ValueError for other meshes."""
    if not isinstance(process_group, DeviceMesh):
        return None
    if process_group.ndim not in (1, 2):
        raise ValueError(
            f"process_group: a DeviceMesh must have 1 dimension, or 2 (replicate, shard), got {process_group.ndim}: "
            'pass those over which gradients are averaged, as mesh["replicate", "shard"]'
        )
    if process_group.get_coordinate() is None:
        raise ValueError(f"process_group: this process is not in {process_group}")
    return grid_of(process_group)


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """In ascending order, as the default group numbers them. None: this rank alone."""
    if group is None:
        return (dist.get_rank() if _is_initialized() else 0,)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def check_group(process_group: GroupArgument) -> tuple[int, int] | None:
    """The shape of a mesh of two axes. Raises as choose_group() does, without asking other ranks for anything."""
    if (grid := choose_grid(process_group)) is not None:
        return grid.shape
    choose_group(process_group)
    return None


def _line_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh in which one axis at most has several ranks."""
    return mesh.get_group(max(range(mesh.ndim), key=lambda axis: mesh.shape[axis]))


# By the default group, which ends with them, and their ranks.
_made_for_grids: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_made_for_grids = weakref.WeakKeyDictionary()


def _all_of(grid: Grid) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    ranks = grid.all_ranks
    if ranks == dist.get_process_group_ranks(world):
        return world
    made = _made_for_grids.setdefault(world, {})
    if tuple(ranks) not in made:
        group = dist.new_group(
            ranks, timeout=time_of(grid.inner), use_local_synchronization=True, group_desc="zerox: of a mesh"
        )
        assert isinstance(group, dist.ProcessGroup)
        made[tuple(ranks)] = group
    return made[tuple(ranks)]


def why_alone(process_group: GroupArgument) -> str:
    """Why an optimizer that has no other ranks has none; empty if the user asked for that."""
    if process_group is not None:
        return ""
    return "while the default group had one rank" if _is_initialized() else "before init_process_group()"


def check_still_alone(why: str) -> None:
    """RuntimeError if there are other ranks now, which would train alone too."""
    if _is_initialized() and (num_ranks := dist.get_world_size()) > 1:
        raise RuntimeError(
            f"zerox: this optimizer was built {why}, and the default group has {num_ranks} ranks now: each would train "
            "alone. Call init_process_group() first and build the optimizer then, or pass "
            f'process_group="{ALONE}" if its gradients are not to be averaged over the ranks'
        )


def reference_to(group: dist.ProcessGroup | None) -> weakref.ref[dist.ProcessGroup] | None:
    """To a user's group, which destroy_process_group() is to end, with its threads, though what it was given to lives.

    A thread that is left may need the interpreter when it is about to end: see Note [Tensors that Python does not
    know] in csrc/exchange/collectives.h.
    """
    return None if group is None else weakref.ref(group)


def referenced(to_group: weakref.ref[dist.ProcessGroup] | None) -> dist.ProcessGroup | None:
    """RuntimeError once the group is destroyed."""
    if to_group is None:
        return None
    group = to_group()
    if group is None:
        raise RuntimeError("zerox: the process group is destroyed: destroy_process_group() comes after this call")
    return group


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def time_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long the ranks of ``group`` wait for each other."""
    return timeout_of(group, "gloo") or dist.default_pg_timeout


def timeout_of(group: dist.ProcessGroup, backend: str) -> datetime.timedelta | None:
    """The group's own timeout; None (the backend's default) if the backend doesn't report it."""
    for type_ in ["cpu", "cuda"] if backend == "gloo" else ["cuda", "cpu"]:
        try:
            options = getattr(_torch.backend_of(group, torch.device(type_)), "options", None)
        except RuntimeError:
            continue
        timeout = _torch.timeout_in(options)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
