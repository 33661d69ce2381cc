"""Arguments of zerox::update_, one of which a test changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.shards import Shard, options_table, segments_of


def byte(count: int = 1) -> Tensor:
    return torch.ones(count, dtype=torch.uint8)


def one_shard() -> dict[str, Any]:
    """What update_ takes of a shard, by the names of its arguments; of state and scales several."""
    shard = Shard(64)
    return {
        "param": shard.param,
        "master": [],
        "grad": shard.grad,
        "state": [shard.exp_avg, shard.exp_avg_sq],
        "scales": [],
        "segments": shard.segments,
        "present": shard.present,
        "steps": shard.steps,
    }


def update_arguments(count: int = 1, **changes: Any) -> tuple[Any, ...]:
    """Of so many shards. ``changes``: of each shard's tensors, of a whole list, or of options and grad_scale."""
    shards = [one_shard() | {name: changes[name] for name in changes if name in one_shard()} for _ in range(count)]
    lists = {}
    for name in one_shard():
        whole = [shard[name] for shard in shards]
        lists[name] = [each for group in whole for each in group] if isinstance(whole[0], list) else whole
    others = {"options": options_table(), "grad_scale": None}
    return ("adam", *lists.values(), *(changes.get(name, other) for name, other in others.items()))


def coded(numel: int = 512, **changes: Any) -> tuple[Any, ...]:
    """The arguments for 8-bit moments."""
    shard = {"param": torch.zeros(numel), "grad": torch.zeros(numel), "segments": segments_of(numel)}
    codes = {"state": [byte(numel), byte(numel)], "scales": [torch.zeros(2), torch.zeros(2)]}
    return update_arguments(**(shard | codes | changes))


def listed(**lists: Any) -> tuple[Any, ...]:
    """The arguments for two shards, with these whole lists instead."""
    names = ("rule", *one_shard(), "options", "grad_scale")
    return tuple((dict(zip(names, update_arguments(2), strict=True)) | lists).values())
