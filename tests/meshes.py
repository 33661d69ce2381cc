"""Meshes for rank functions that train many times: each is made once.

The groups of a mesh live as long as the default group, with threads of gloo that all wake up now and then: where each
training made its own, a rank came to 800 threads, and the last trainings took six times as long as the first.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_made: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


def mesh_once(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Of all ranks, on the CPU. Collective, as init_device_mesh(): ranks ask for the same ones in the same order."""
    if (sizes, names) not in _made:
        _made[sizes, names] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _made[sizes, names]


def forget_meshes() -> None:
    """Where the default group ends: the next one has other groups."""
    _made.clear()
