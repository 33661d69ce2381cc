"""Bytes per rank by category: by formula here, from the real storages in FusedShardedAdam.memory_bytes()."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from zerox.bucket import MASTER_DTYPES, moment_dtype
from zerox.options import Options, check_params, named_tensors
from zerox.plan.stage import SHARDED


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on one rank.

    ``parameters``, ``gradients``, ``master`` and ``moments`` stay from step to step (gradients until zero_grad).
    ``exchange`` is the most that buffers of buckets on their way take, ``local_gradients`` the most that gradients
    take which have not left yet: all of them if the wire stalls, typically those of one or two buckets.
    """

    parameters: int
    gradients: int
    master: int
    moments: int
    exchange: int = 0
    local_gradients: int = 0

    @property
    def lasting(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.master + self.moments


def estimate(
    params: Any, world_size: int, *, backend: str = "gloo", amsgrad: bool = False, **options: Any
) -> MemoryBytes:
    """Bytes per rank of training ``params`` with ``FusedShardedAdam(params, **options)`` over ``world_size`` ranks.

    ``params``: as for the optimizer; nothing is allocated and nothing changed. ``backend``: "gloo" or "nccl", which the
    default bucket size and ``exchange`` depend on (with the backend's default of ZEROX_EXCHANGE). Options that don't
    change memory (lr and so on) are accepted. Raises ValueError as the constructor does.
    """
    known = {field.name for field in dataclasses.fields(Options)}
    chosen = Options(**{name: value for name, value in options.items() if name in known})
    everything = named_tensors(params)
    trained = [(name, tensor, group) for name, tensor, group in everything if tensor.requires_grad]
    tensors = [tensor for _, tensor, _ in trained]
    check_params([name for name, _, _ in trained], tensors)
    chosen.check_dtypes(tensor.dtype for tensor in tensors)

    frozen = sum(tensor.nbytes for _, tensor, _ in everything if not tensor.requires_grad)
    parameters, gradients, master, moments, exchange = frozen, 0, 0, 0, 0
    for plan in chosen.plan([name for name, _, _ in trained], tensors, backend, world_size):
        layout, dtype = plan.layout, tensors[plan.params[0]].dtype
        wire = chosen.wire_dtype(dtype)
        parameters += layout.numel * dtype.itemsize
        if chosen.placements.grads is SHARDED:
            gradients += (layout.shard_numel if world_size > 1 else layout.numel + layout.trailer_numel) * wire.itemsize
        else:
            whole_numel = layout.numel if world_size > 1 else sum(layout.numels)
            gradients += whole_numel * dtype.itemsize + (layout.shard_numel * wire.itemsize if wire != dtype else 0)
        kind = chosen.master_kind(dtype)
        master += layout.shard_numel * MASTER_DTYPES[kind].itemsize if kind else 0
        has_third = any(trained[index][2].get("amsgrad", amsgrad) for index in plan.params)
        moments += (3 if has_third else 2) * layout.shard_numel * moment_dtype(dtype).itemsize
        # What is sent, and room for what comes: a slice from each other rank where they come one by one, else the sum.
        slices = world_size + (world_size - 1 if backend == "gloo" else 1) if world_size > 1 else 0
        exchange = max(exchange, slices * (layout.shard_numel + layout.trailer_numel) * wire.itemsize)
    local = sum(tensor.nbytes for tensor in tensors)
    return MemoryBytes(parameters, gradients, master, moments, 2 * exchange, local)


def measured_bytes(tensors: list[torch.Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
