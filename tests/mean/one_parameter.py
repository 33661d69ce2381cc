"""Parameters of every kind of place and state, for tests of the calls that are about one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.optimizer.models import mean_in_rank_order
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD, ShardedOptimizer

STAGES = (1, 2, 3)
WORLDS = (1, 2, 3)
NAMES = ("spans", "small", "empty", "unused", "scalar", "late", "whole")
UNUSED = ("unused",)  # no rank has a gradient of these
CAP_MB = 0.005
# The parameters' dtype, the class and its options.
KINDS: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "fp32": (torch.float32, FusedShardedAdam, {}),
    "amsgrad": (torch.float32, FusedShardedAdam, {"amsgrad": True}),
    "fp64": (torch.float64, FusedShardedAdam, {}),
    "bf16 remainder": (torch.bfloat16, FusedShardedAdam, {}),
    "bf16 fp32, wide wire": (
        torch.bfloat16,
        FusedShardedAdam,
        {"master_weights": "fp32", "reduce_dtype": torch.float32},
    ),
    "fp16, narrow wire": (torch.float16, FusedShardedAdam, {"accumulate_dtype": torch.float32}),
    "bf16 moments": (torch.float32, FusedShardedAdam, {"state_dtype": torch.bfloat16}),
    "8 bit": (torch.bfloat16, FusedShardedAdam, {"state_dtype": "8bit"}),
    "sgd": (torch.float32, FusedShardedSGD, {"momentum": 0.9}),
    "lion": (torch.bfloat16, FusedShardedLion, {"state_dtype": "8bit"}),
    "rmsprop": (torch.float32, ShardedOptimizer, {"optimizer_class": torch.optim.RMSprop, "momentum": 0.9}),
    "inner bf16": (
        torch.bfloat16,
        ShardedOptimizer,
        {"optimizer_class": torch.optim.SGD, "momentum": 0.9, "master_weights": None},
    ),
    "inner masters": (torch.bfloat16, ShardedOptimizer, {"optimizer_class": torch.optim.AdamW}),
}


def make_params(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """ "spans" is transposed, and lies on all ranks; "small" on one."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((130, 50), (7,), (0, 3), (5, 6), (), (11,), (60, 80))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made[0] = made[0].t()
    return {name: nn.Parameter(each) for name, each in zip(NAMES, made, strict=True)}


def build(kind: str, stage: int, **more: Any) -> tuple[dict[str, nn.Parameter], Any]:
    dtype, cls, options = KINDS[kind]
    params = make_params(dtype)
    chosen = {"lr": 0.01, "stage": stage, "bucket_cap_mb": CAP_MB, **options, **more}
    return params, cls(list(params.items()), **chosen)


def gradient(rank: int, step: int, name: str, param: Tensor) -> Tensor:
    """What backward() gives a rank; "late" only the last of three ranks, if there are as many."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + NAMES.index(name))
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def has_gradient(rank: int, world_size: int, name: str) -> bool:
    return name not in UNUSED and (name != "late" or rank == world_size - 1)


def backward(rank: int, world_size: int, step: int, params: dict[str, nn.Parameter]) -> None:
    """Gradients that are known to the bit."""
    used = {name: p for name, p in params.items() if has_gradient(rank, world_size, name)}
    sum((p * gradient(rank, step, name, p)).sum().double() for name, p in used.items()).backward()  # type: ignore[union-attr]


def mean_gradient(world_size: int, step: int, name: str, param: Tensor, wire: torch.dtype) -> Tensor | None:
    """The contract's mean, as reduced in the dtype ``wire``: wide, on the host."""
    parts = [
        gradient(rank, step, name, param) if has_gradient(rank, world_size, name) else None
        for rank in range(world_size)
    ]
    if all(part is None for part in parts):
        return None
    like = torch.empty(param.shape, dtype=wire)
    mean = mean_in_rank_order([None if part is None else part.to(wire) for part in parts], like)
    assert mean is not None
    return mean.to(torch.promote_types(wire, torch.float32))


def whole_values(params: dict[str, nn.Parameter], optimizer: Any) -> list[Tensor]:
    with optimizer.whole():
        return [p.detach().clone() for p in params.values()]


def own_bytes(optimizer: Any) -> dict[tuple[int, str], Tensor]:
    """All that this rank keeps of the state, as it is stored."""
    found = {}
    for index, bucket in enumerate(optimizer.inside.buckets):
        for stored in bucket.state.values():
            found |= {(index, key): each.clone() for key, each in stored.tensors().items()}
        found |= {(index, key): each.clone() for key, each in bucket.numbers.items()}
    return found


def assert_same(first: Any, second: Any, what: str) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys(), what
        first, second = list(first.values()), list(second.values())
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert same_bits(one, other), f"{what}: number {index}"


def assert_same_on_all_ranks(value: Tensor, what: str) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert all(same_bits(each, value) for each in everyone), what
