"""What a param group's process_group is refused for, on all of four ranks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import Once
from zerox import FusedShardedAdam, ShardedOptimizer

Groups = dict[tuple[int, ...], Any]
OF_GROUP = "a param group on a sub-group"
CUTS = ((0, 2), (1, 3), (0, 1), (2, 3), (1,), (0, 1, 2), (3,))


def made(group: Any, cls: Any = FusedShardedAdam, shape: int = 6, **options: Any) -> Any:
    own = {"params": [("expert", nn.Parameter(torch.ones(shape)))], "process_group": group}
    return cls([{"params": [("dense", nn.Parameter(torch.ones(3)))]}, own], **options)


def usual(rank: int, groups: Groups) -> Any:
    return groups[(0, 2)] if rank % 2 == 0 else groups[(1, 3)]


def names_differ(rank: int, groups: Groups) -> None:
    name = "other" if rank == 3 else f"expert {rank % 2}"
    FusedShardedAdam([{"params": [(name, nn.Parameter(torch.ones(6)))], "process_group": usual(rank, groups)}])


def over_a_mesh(rank: int, groups: Groups) -> None:
    made(usual(rank, groups), process_group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def with_dtensors(rank: int, groups: Groups) -> None:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    cut = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    FusedShardedAdam([{"params": [("odd", cut)], "process_group": usual(rank, groups)}], process_group=mesh["dp"])


def added(rank: int, groups: Groups) -> None:
    optimizer = FusedShardedAdam([nn.Parameter(torch.ones(3))], stage=3)
    own = {"params": [nn.Parameter(torch.ones(6))], "process_group": usual(rank, groups)}
    try:
        optimizer.add_param_group(own)
    finally:
        assert len(optimizer.param_groups) == 1
        assert own["process_group"] is usual(rank, groups)


def outside(rank: int, groups: Groups) -> None:
    """Ranks 0 and 1 have an optimizer of their own, whose experts are over others."""
    half = groups[(0, 1)] if rank < 2 else groups[(2, 3)]
    made(usual(rank, groups), process_group=half)


def on_one_rank(rank: int, groups: Groups) -> None:
    made(usual(rank, groups) if rank < 3 else None)


REFUSALS: dict[str, tuple[Callable[[int, Groups], Any], str]] = {
    "overlap": (
        lambda r, g: made(g[(0, 2)] if r == 0 else g[(0, 1, 2)] if r < 3 else g[(3,)]),
        r"param group 1: the process_group of rank 0, of ranks \[0, 2\], has rank 2, whose own is of ranks \[0, 1, 2\]",
    ),
    "outside": (outside, r"has rank [23], which the optimizer's own process_group lacks|has rank [01], which"),
    "not in it": (lambda r, g: made(g[(1,)]), "param group 1: process_group must be a ProcessGroup this process is in"),
    "on one rank": (
        on_one_rank,
        r"rank 0 has a process_group in param groups \[1\]; rank 3 has a process_group in param groups \[\]",
    ),
    "a wish": (lambda r, g: made("a wish"), "param group 1: process_group must be a ProcessGroup"),
    "shapes": (lambda r, g: made(usual(r, g), shape=6 + r % 2), r"an expert's parameter \(6,\).*rank 1 has .*\(7,\)"),
    "names": (names_differ, "rank 1 has parameter 'expert 1' in group 0; rank 3 has parameter 'other'"),
    "stage 3": (lambda r, g: made(usual(r, g), stage=3), f"stage=3 does not go with {OF_GROUP}"),
    "any class": (
        lambda r, g: made(usual(r, g), functools.partial(ShardedOptimizer, optimizer_class=torch.optim.SGD)),
        f"ShardedOptimizer does not go with {OF_GROUP}",
    ),
    "a mesh": (over_a_mesh, f"a 2-D mesh does not go with {OF_GROUP}"),
    "DTensors": (with_dtensors, f"{OF_GROUP} does not go with parameters that are DTensors, as 'odd': no one"),
    "added": (added, f"stage=3 does not go with {OF_GROUP}"),
}


def refused(rank: int, _: int) -> dict[str, str]:
    groups: Groups = {ranks: dist.new_group(list(ranks)) for ranks in CUTS}
    found = {}
    for name, (call, _message) in REFUSALS.items():
        try:
            call(rank, groups)
            found[name] = "taken"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


found = Once(refused, 4, timeout_s=60)


@pytest.mark.parametrize("name", REFUSALS)
def test_it_is_refused_on_all_ranks_with_its_name(name: str) -> None:
    for of_rank in found():
        assert of_rank[name].startswith(("ValueError: ", "RuntimeError: ")), of_rank[name]
    assert any(re.search(REFUSALS[name][1], of_rank[name]) for of_rank in found()), [
        of_rank[name] for of_rank in found()
    ]
