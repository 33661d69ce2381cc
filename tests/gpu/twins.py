"""Tensors of the CPU and their twins on a device: fenced, off the alignment, and compared bit by bit."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.kernels.shards import Shard, options_table, same_bits
from zerox.rules.adam import ADAM
from zerox.rules.rule import Rule

CPU = torch.device("cpu")
if os.environ.get("ZEROX_TEST_DEVICE") == "fake":  # see conftest.py
    from tests.accelerator.fake import machine

    machine()
DEVICE = torch.device(os.environ.get("ZEROX_TEST_DEVICE", "cuda"))
# Elements on either side. None where torch's allocator keeps no cache: then each tensor is an allocation of its own,
# and compute-sanitizer watches its ends.
FENCE = 0 if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") else 64
POISON = 0xFF  # as every byte it makes a NaN of each float type


class Fences:
    """Puts tensors on a device between fences, which check() finds changed where a kernel wrote past an end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fenced: list[tuple[Tensor, int, int]] = []  # bytes of the buffer, and where the tensor lies in it

    def room(self, numel: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A poisoned tensor that starts ``offset`` elements behind a multiple of its alignment in the allocator."""
        start = FENCE + offset
        bytes_ = torch.full(((start + numel + FENCE) * dtype.itemsize,), POISON, dtype=torch.uint8)
        bytes_ = bytes_.to(self.device)
        self.fenced.append((bytes_, start * dtype.itemsize, (start + numel) * dtype.itemsize))
        return bytes_.view(dtype)[start : start + numel]

    def put(self, tensor: Tensor, offset: int = 0) -> Tensor:
        room = self.room(tensor.numel(), tensor.dtype, offset).view(tensor.shape)
        room.copy_(tensor)
        return room

    def check(self) -> None:
        for bytes_, start, stop in self.fenced:
            host = bytes_.cpu()
            outside = torch.cat([host[:start], host[stop:]])
            assert (outside == POISON).all(), f"written outside a tensor of {stop - start} bytes"


def twin_of(shard: Shard, fences: Fences, offset: int = 0) -> Shard:
    """The same shard on the device; ``offset`` elements off the alignment, the gradient one element more."""
    twin = copy.copy(shard)
    for name, value in vars(shard).items():
        if isinstance(value, Tensor):
            setattr(twin, name, fences.put(value, offset + (name == "grad" and offset > 0)))
    twin.scales = [fences.put(scales, offset) for scales in shard.scales]
    return twin


def same_bits_but_nan(a: Tensor, b: Tensor) -> bool:
    """NaN for NaN, and everything else bit for bit: a NaN that arithmetic makes is another on each device."""
    a, b = a.cpu(), b.cpu()
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def in_blocks(segments: Tensor) -> tuple[Tensor, int]:
    """The segments moved apart so that each starts with a block of 8-bit moments, and the numel of their shard."""
    rows, end = [], 0
    for start, stop, *rest in segments.tolist():
        rows.append([end, end + stop - start, *rest])
        end += -(-(stop - start) // 256) * 256 + (start % 2) * 256
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5), end + 256


def ragged_segments(rng: random.Random, groups: int = 1) -> tuple[Tensor, int]:
    """Segments of all sorts of lengths with gaps between some, and the numel of a shard that ends in padding."""
    numels = [0, 1, 2, 7, 8, 31, 255, 256, 257, 1000, 4096, 10_007]
    rng.shuffle(numels)
    rows, end = [], rng.choice([0, 3])
    for numel in numels:
        param, param_start = rng.randrange(2**40), 256 * rng.choice([0, 0, 1, 2**24 - 2])
        rows.append([end, end + numel, rng.randrange(groups), param, param_start])
        end += numel + rng.choice([0, 0, 1, 5, 300])
    return torch.tensor(rows, dtype=torch.int64), end + rng.choice([0, 13])


# Param groups that differ in everything, those first that keep fewest states.
MIXED: dict[str, list[dict[str, Any]]] = {
    "adam": [
        {},
        {"lr": 0.3, "betas": (0.3, 0.2), "maximize": True, "weight_decay": 0.0},
        {"amsgrad": True, "decoupled_weight_decay": False},
        {"amsgrad": True, "eps": 0.1},
    ],
    "sgd": [
        {"momentum": 0.0},
        {"momentum": 0.0, "lr": 0.3, "maximize": True, "weight_decay": 0.0},
        {"nesterov": True},
        {"dampening": 0.3, "lr": 0.3, "maximize": True, "weight_decay": 0.0},
    ],
    "lion": [{}, {"lr": 0.3, "betas": (0.3, 0.2), "maximize": True, "weight_decay": 0.0}],
}


def mixed_options(rule: Rule = ADAM) -> Tensor:
    return torch.cat([options_table(rule, **config) for config in MIXED[rule.name]])


def num_fitting(rule: Rule, config: Mapping[str, Any]) -> int:
    """How many of ``MIXED`` keep no more states than a group of this ``config``."""
    most = len(Shard(0, rule=rule, config=config).kept)
    return sum(len(Shard(0, rule=rule, config=each).kept) <= most for each in MIXED[rule.name])


def strew(tensor: Tensor, generator: torch.Generator) -> None:
    """Puts zeros of both signs, subnormal, tiny and large numbers here and there, as they come in gradients."""
    flat = tensor.view(-1)
    info = torch.finfo(tensor.dtype)
    for value in (0.0, -0.0, info.smallest_normal / 4, -info.smallest_normal / 8, info.tiny, info.max / 1e3):
        places = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 50 + 1]
        flat[places] = value


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every pattern that the dtype has, NaNs with their payloads too."""
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
