"""What the values of a way stand for: arguments of the constructor, a mesh, an optimizer."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.meshes import mesh_once
from tests.optimizer.ways import Way, is_inner
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.plan.choices import A_SUBGROUP, CHOICES, DTENSORS, FIRST_VALUES, LIE_AS, MASKS, SUBGROUP, TABLES
from zerox.rules.adam import ADAM
from zerox.rules.known import KNOWN

ON_MESH, ALONE = "a 2-D mesh", '"alone"'
RATE = 2.0**-7  # the same number in float32
WORDS: dict[str, dict[str, Any]] = {  # values that are not written as Python has them
    "process_group": {"a group": None, ON_MESH: None},  # a mesh is made where there are ranks
    "bucket_cap_mb": {"a number": 0.004},
    "resident_mb": {"a number": 1.0},
    "lr": {"a number": RATE, "a tensor": RATE},
    "gradient_divisor": {"a number": 8.0},
}
# No argument of the constructor says these.
ELSEWHERE = (
    "optimizer",
    "parameters",
    LIE_AS,
    FIRST_VALUES,
    "device",
    SUBGROUP,
    "backend",
    "overlap_gather",
    "mean_over",
    "join",
    MASKS,
    "rule",
    TABLES,
)
OF_CLASSES = ("whole",)  # which ShardedOptimizer alone has
MOMENTUM = {"momentum": 0.75}  # of SGD, which keeps no state without


def mesh_of(way: Way) -> DeviceMesh | None:
    """(replicate, shard, tp), where there are ranks: gradients are averaged over the first two, and DTensors cut over
    the third."""
    if not dist.is_initialized() or (way["process_group"] != ON_MESH and way[LIE_AS] != DTENSORS):
        return None
    world_size = dist.get_world_size()
    replicate, shard = {ON_MESH: (2, 2), ALONE: (1, 1)}.get(way["process_group"], (1, 2))
    sizes = (replicate, shard, world_size // (replicate * shard))
    return mesh_once(sizes, ("replicate", "shard", "tp"))


def arguments(way: Way, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """The constructor's. KeyError or ValueError for a value that nobody has said how to make."""
    unsaid = () if is_inner(way) else [name for name in OF_CLASSES if way[name] == CHOICES[name].values[0]]
    found = {name: _made(name, value) for name, value in way.items() if name not in (*ELSEWHERE, *unsaid)}
    if mesh is not None and way["process_group"] != ALONE:
        found["process_group"] = mesh["replicate", "shard"] if way["process_group"] == ON_MESH else mesh["shard"]
    if way["lr"] == "a tensor":
        found["lr"] = torch.tensor(RATE)
    return found


def _made(option: str, value: str) -> Any:
    if value in WORDS.get(option, {}):
        return WORDS[option][value]
    return getattr(torch, value[6:]) if value.startswith("torch.") else ast.literal_eval(value)


def build(params: Any, way: Way, **options: Any) -> FusedShardedAdam | ShardedOptimizer:
    """``options``: the constructor's. With a rule of its own, the group has those that belong into one.

    With tables, which are the parameters of two dimensions, they have a group of their own.
    """
    rule = ast.literal_eval(way["rule"])
    group: dict[str, Any] = {"params": params}
    groups = [group]
    if way[TABLES] == "True":
        named = list(params)
        tables = [each for each in named if (each[1] if isinstance(each, tuple) else each).dim() == 2]
        group["params"] = [each for each in named if not any(each is table for table in tables)]
        groups.append({"params": tables, "sparse": True, "weight_decay": 0.0})
        if not group["params"]:
            group = groups[1]
            groups = [group]
    if way[SUBGROUP] == A_SUBGROUP:
        alone = way["process_group"] == ALONE or way[LIE_AS] == DTENSORS
        group["process_group"] = "alone" if alone else sub_group()
    if rule != ADAM.name:
        own = {name: value for name, value in options.items() if name in ADAM.defaults}
        mute = ADAM.defaults.keys() - KNOWN[rule].defaults.keys()
        unsaid = {name for name in mute & own.keys() if own[name] == ADAM.defaults[name]}
        said = {name: value for name, value in own.items() if name not in unsaid}
        for each in groups:
            each |= {**said, **each, "rule": rule}
        group |= MOMENTUM if rule == "sgd" and not group.get("sparse") else {}
        options = {name: value for name, value in options.items() if name not in own}
    made: FusedShardedAdam | ShardedOptimizer
    made = (ShardedOptimizer if is_inner(way) else FusedShardedAdam)(groups, **of_optimizer(way, options))
    return made


def sub_group() -> DeviceMesh:
    """Every second rank."""
    return mesh_once((dist.get_world_size() // 2, 2), ("edp", "ep"))["edp"]


def of_optimizer(way: Way, options: Mapping[str, Any]) -> dict[str, Any]:
    """Torch's class has no options that only the fused optimizers have: where they are at their defaults."""
    if not is_inner(way):
        return dict(options)
    of_fused = ("state_dtype", "accumulate_dtype", "capturable")
    left_out = [name for name in of_fused if name in options and way[name] == CHOICES[name].values[0]]
    others = {name: value for name, value in options.items() if name not in left_out}
    return {"optimizer_class": torch.optim.Adam, **others}
