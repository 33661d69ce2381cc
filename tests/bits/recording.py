"""What is recorded of a training: on every rank its parameters, norms and messages, and the whole state.

Only :func:`messages_of` uses more of zerox than its public names.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.bits.trainings import KINDS, OF_FEW, WAYS, Training


def cases() -> list[tuple[int, int, str, str]]:
    """(ranks, stage, kind, way): every kind clipped, every way with what differs most, and few of all worlds."""
    stages = (1, 2, 3)
    found = [(2, stage, kind, "clipped") for kind, stage in itertools.product(KINDS, stages)]
    for way, stage in itertools.product([way for way in WAYS if way != "on a mesh"], stages):
        found.append((3, stage, "fp32", way))
        if way not in OF_FEW:
            found.append((2, stage, "three rules, 8-bit state" if stage == 1 else "bf16 remainder", way))
    for world_size, stage, way in itertools.product((1, 4), stages, ("clipped", "saved and loaded")):
        found.append((world_size, stage, "fp32" if stage < 3 else "bf16 remainder, 8-bit moments", way))
    found += [(4, stage, kind, "on a mesh") for stage, kind in itertools.product(stages, ("fp32", "bf16 remainder"))]
    return found


def digest(values: Iterator[tuple[str, Any]]) -> str:
    """A hash of names and values; of a tensor its dtype, shape and elements."""
    found = hashlib.sha256()
    for name, value in values:
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


def named_state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The whole state, on rank 0."""
    whole = optimizer.full_state_dict()
    for number, state in sorted(whole.get("state", {}).items()):
        for key, value in sorted(state.items()):
            yield f"{number} {key}", value


def messages_of(optimizer: Any) -> tuple[int, int]:
    """The number of messages that this rank has sent, and their bytes."""
    return optimizer.inside.manager.traffic if dist.is_initialized() and dist.get_world_size() > 1 else (0, 0)


def train(rank: int, world_size: int, stage: int, kind: str, way: str, folder: str) -> dict[str, Any]:
    training = Training(rank, stage, kind, Path(folder))
    WAYS[way](training)
    training.optimizer.synchronize()
    messages = messages_of(training.optimizer)
    with training.optimizer.whole():
        params = digest(iter(training.model.named_parameters()))
    return {
        "params": params,
        "state": digest(named_state(training.optimizer)),
        "told": [each.hex() for each in training.told],
        "messages": list(messages),
    }


def train_all(rank: int, world_size: int, asked: Sequence[tuple[int, str, str]], folder: str) -> list[Any]:
    """What came of each, or what it raised."""
    found: list[Any] = []
    for number, (stage, kind, way) in enumerate(asked):
        try:
            found.append(train(rank, world_size, stage, kind, way, f"{folder}/{world_size}-{number}"))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
