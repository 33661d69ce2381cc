"""What ranks on several machines are told."""

from __future__ import annotations

import os

from zerox.plan.stage import SHARDED, Stage
from zerox.ranks.calls import warn_caller
from zerox.ranks.group import Ranks
from zerox.ranks.process_group import GroupArgument

_advised: list[bool] = []


def advise_mesh(ranks: Ranks, process_group: GroupArgument, stage: Stage) -> None:
    """Warns rank 0 once if the default group's ranks are on several machines, several on each, as torchrun says.

    Not where the user chose a group, nor where parameters are sharded, of which each rank keeps more on a mesh.
    """
    if process_group is not None or stage.params is SHARDED:
        return
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if ranks.rank > 0 or not 1 < num_local < ranks.size or ranks.size % num_local or _advised:
        return
    _advised.append(True)
    shape = ranks.size // num_local, num_local
    mesh = f'init_device_mesh("{ranks.device.type}", {shape}, mesh_dim_names=("replicate", "shard"))'
    warn_caller(
        f"zerox: these {ranks.size} ranks are on {shape[0]} machines, and each sends its gradients to all others. With "
        f"process_group={mesh} they are added up inside each machine first, and 1/{num_local} of the bytes go between "
        "machines. Pass a group to leave it so"
    )
