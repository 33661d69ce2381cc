"""Arguments of zerox::update_, one of which a test changes, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.shards import Shard, options_table, segments_of
from zerox.rules.adam import ADAM
from zerox.rules.lion import LION
from zerox.rules.rule import Rule
from zerox.rules.sgd import SGD


def byte(count: int = 1) -> Tensor:
    return torch.ones(count, dtype=torch.uint8)


def one_shard(rule: Rule = ADAM) -> dict[str, Any]:
    """What update_ takes of a shard, by the names of its arguments; of state and scales several."""
    shard = Shard(64, rule=rule)
    return {
        "param": shard.param,
        "master": [],
        "grad": shard.grad,
        "state": list(shard.states.values()),
        "scales": [],
        "segments": shard.segments,
        "present": shard.present,
        "steps": shard.steps,
    }


def update_arguments(count: int = 1, rule: Rule = ADAM, **changes: Any) -> tuple[Any, ...]:
    """Of so many shards. ``changes``: of each shard's tensors, of a whole list, or of options and grad_scale."""
    shards = [one_shard(rule) | {name: changes[name] for name in changes if name in one_shard()} for _ in range(count)]
    lists = {}
    for name in one_shard():
        whole = [shard[name] for shard in shards]
        lists[name] = [each for group in whole for each in group] if isinstance(whole[0], list) else whole
    others = {"options": options_table(rule), "grad_scale": None, "masks": []}
    return (rule.name, *lists.values(), *(changes.get(name, other) for name, other in others.items()))


def coded(numel: int = 512, **changes: Any) -> tuple[Any, ...]:
    """The arguments for 8-bit moments."""
    shard = {"param": torch.zeros(numel), "grad": torch.zeros(numel), "segments": segments_of(numel)}
    codes = {"state": [byte(numel), byte(numel)], "scales": [torch.zeros(2), torch.zeros(2)]}
    return update_arguments(**(shard | codes | changes))


def listed(**lists: Any) -> tuple[Any, ...]:
    """The arguments for two shards, with these whole lists instead."""
    names = ("rule", *one_shard(), "options", "grad_scale", "masks")
    return tuple((dict(zip(names, update_arguments(2), strict=True)) | lists).values())


# The op, its arguments, and what the error says.
REFUSED_UPDATES: dict[str, tuple[str, Callable[[], tuple[Any, ...]], str]] = {
    "a float64 gradient": (
        "update_",
        lambda: update_arguments(grad=torch.zeros(64, dtype=torch.float64)),
        "`grad` must not be",
    ),
    "a short gradient": (
        "update_",
        lambda: update_arguments(grad=torch.zeros(63)),
        "`grad` must have 64 elements, got 63",
    ),
    "a half moment": ("update_", lambda: update_arguments(state=[torch.zeros(64).half()] * 2), "`state` must be Float"),
    "a master beside fp32": ("update_", lambda: update_arguments(master=[torch.zeros(64)]), "`master` must be"),
    "moments of two dtypes": (
        "update_",
        lambda: update_arguments(state=[torch.zeros(64).bfloat16(), torch.zeros(64)]),
        "`state` must be BFloat16, got Float",
    ),
    "bfloat16 moments of float64": (
        "update_",
        lambda: update_arguments(param=torch.zeros(64).double(), state=[torch.zeros(64).bfloat16()] * 2),
        "`state` must be Double beside a Double parameter, got BFloat16",
    ),
    "scales beside float32": (
        "update_",
        lambda: update_arguments(scales=[torch.zeros(1)]),
        "`scales` must be 0 tensors beside 2 of Float, got 1",
    ),
    "codes without scales": ("update_", lambda: coded(scales=[]), "`scales` must be 2 tensors beside 2 of Byte"),
    "a scale too few": ("update_", lambda: coded(scales=[torch.zeros(2), torch.zeros(1)]), "`scales` must have 2 elem"),
    "scales of halves": ("update_", lambda: coded(scales=[torch.zeros(2).half()] * 2), "`scales` must be Float, got"),
    "no scale for part of a block": (
        "update_",
        lambda: coded(numel=300, scales=[torch.zeros(1)] * 2),
        "`scales` must have 2 elem",
    ),
    "codes that start inside a block": (
        "update_",
        lambda: coded(segments=torch.tensor([[16, 300, 0, 0, 0]])),
        "`segments` row 0 starts at 16 of the shard and 0 of its parameter: 8-bit states need multiples of 256",
    ),
    "codes of a parameter cut inside a block": (
        "update_",
        lambda: coded(segments=torch.tensor([[256, 512, 0, 0, 100]])),
        "`segments` row 0 starts at 256 of the shard and 100 of its parameter",
    ),
    "options of another width": (
        "update_",
        lambda: update_arguments(options=torch.zeros(1, 7, dtype=torch.float64)),
        "`options` must be",
    ),
    "a missing row of options": (
        "update_",
        lambda: update_arguments(segments=torch.tensor([[0, 64, 1, 0, 0]])),
        "names options 1 of 1",
    ),
    "amsgrad without its state": (
        "update_",
        lambda: update_arguments(options=options_table(amsgrad=True)),
        "`state` must be 3 tensors a shard for options row 0, got 2",
    ),
    "a scale of no elements": (
        "update_",
        lambda: update_arguments(grad_scale=torch.zeros(0, dtype=torch.float64)),
        "`grad_scale` must have 1 elements, got 0",
    ),
    "a gradient with gaps": (
        "update_",
        lambda: update_arguments(grad=torch.zeros(128)[::2]),
        "`grad` must be contiguous",
    ),
    "a moment with gaps": (
        "update_",
        lambda: update_arguments(state=[torch.zeros(64), torch.zeros(128)[::2]]),
        "`state` must be contiguous",
    ),
    "presence of floats": (
        "update_",
        lambda: update_arguments(present=torch.ones(1)),
        "`present` must be Byte, got Float",
    ),
    "more counts than segments": (
        "update_",
        lambda: update_arguments(steps=torch.zeros(2, dtype=torch.int64)),
        "`steps` must have 1 elements, got 2",
    ),
    "a gradient too few": (
        "update_",
        lambda: listed(grad=[torch.zeros(64)]),
        "`grad` must be 2 tensors, got 1",
    ),
    "one master for two": (
        "update_",
        lambda: listed(master=[torch.zeros(64)]),
        "`master` must be 2 tensors, got 1",
    ),
    "three scales for two": (
        "update_",
        lambda: listed(scales=[torch.zeros(1)] * 3),
        "`scales` must be as many for each of 2 shards, got 3",
    ),
    "three moments for two": (
        "update_",
        lambda: listed(state=[torch.zeros(64)] * 3),
        "`state` must be as many for each of 2 shards, got 3",
    ),
    "one moment": (
        "update_",
        lambda: update_arguments(state=[torch.zeros(64)]),
        "`state` must be 2 to 3 tensors a shard for adam, got 1",
    ),
    "an unknown rule": ("update_", lambda: listed(rule="muon"), "`rule` must be adam, sgd, lion, got muon"),
    "momentum without its buffer": (
        "update_",
        lambda: update_arguments(rule=SGD, state=[]),
        "`state` must be 1 tensors a shard for options row 0, got 0",
    ),
    "two buffers": (
        "update_",
        lambda: update_arguments(rule=SGD, state=[torch.zeros(64)] * 2),
        "`state` must be 0 to 1 tensors a shard for sgd, got 2",
    ),
    "lion without its average": (
        "update_",
        lambda: update_arguments(rule=LION, state=[]),
        "`state` must be 1 to 1 tensors a shard for lion, got 0",
    ),
    "adam's options for sgd": (
        "update_",
        lambda: update_arguments(rule=SGD, options=options_table()),
        "`options` must be [groups, 6], got [1, 8]",
    ),
    "a short mask": ("update_", lambda: listed(masks=[byte(11)] * 2), "`mask` must have 12 elements, got 11"),
    "one mask for two": ("update_", lambda: listed(masks=[byte(12)]), "`masks` must be 2 tensors, got 1"),
    "a float32 scale": (
        "update_",
        lambda: update_arguments(grad_scale=torch.tensor(1.0)),
        "`grad_scale` must be Double",
    ),
}
