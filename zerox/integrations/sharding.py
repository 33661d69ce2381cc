"""The zerox optimizers of a framework's strategy, whatever the framework."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zerox.engine import Engine
from zerox.integrations.engines import engines_of, no_sync
from zerox.integrations.from_torch import become_sharded
from zerox.integrations.scalers import takes_all_ranks
from zerox.optimizers import FusedShardedAdam

# What DistributedDataParallel has and zerox needs not, or does in another way.
NOT_TAKEN = {
    "find_unused_parameters": "a parameter without a gradient needs no option",
    "static_graph": "a graph may change from step to step",
    "gradient_as_bucket_view": "gradients leave during backward",
    "ddp_comm_hook": "reduce_dtype is the dtype that gradients are sent in",
    "ddp_comm_state": "reduce_dtype is the dtype that gradients are sent in",
    "ddp_comm_wrapper": "reduce_dtype is the dtype that gradients are sent in",
    "model_averaging_period": "gradients are averaged in each step",
    "process_group": "it is over all ranks of the strategy; replicate_size= makes a mesh of them",
}


class Sharding:
    """The zerox optimizers of a strategy, and the options for those that it makes. ``stage``: None for the default.

    ``replicate_size``: in how many parts, machines as a rule, each has all of what is sharded; 1 for one.
    """

    def __init__(self, stage: int | None, options: Mapping[str, Any], replicate_size: int = 1) -> None:
        for name in options:
            if name in NOT_TAKEN:
                raise TypeError(f"the zerox strategy takes no {name}: {NOT_TAKEN[name]}")
            if name not in _options():
                raise TypeError(f"the zerox strategy has no option {name!r}; it has {', '.join(_options())}")
        self.options = {**({} if stage is None else {"stage": stage}), **options}
        self.replicate_size = replicate_size
        self._mesh: Any = None
        self._taken: list[weakref.ref[Engine]] = []

    @property
    def optimizers(self) -> list[Engine]:
        """Those that live."""
        return [optimizer for each in self._taken if (optimizer := each()) is not None]

    def take(self, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
        """Makes it one of zerox's, if it is none. Collective."""
        optimizer = unwrap(optimizer)
        if type(optimizer).__name__ == "_MockOptimizer":  # Lightning's own, for a module that has none
            return optimizer
        if not isinstance(optimizer, Engine):
            optimizer = become_sharded(optimizer, {**self.options, **self._group(device)})
        elif given := [*self.options, *(["replicate_size"] if self.replicate_size != 1 else [])]:
            raise ValueError(
                f"the zerox strategy was given {', '.join(given)}, which is for optimizers of torch, and got a "
                f"{type(optimizer).__name__}, which is built already: give its constructor these options, or build an "
                "optimizer of torch"
            )
        elif optimizer.inside.ranks.device != device:
            raise RuntimeError(
                f"a {type(optimizer).__name__} was built while its parameters were on {optimizer.inside.ranks.device}, "
                f"and the model is on {device} now: build an optimizer of torch, which the strategy makes zerox's once "
                "the model has moved, or build it after the move"
            )
        self._taken = [each for each in self._taken if each() not in (None, optimizer)]
        self._taken.append(weakref.ref(optimizer))
        return optimizer

    def _group(self, device: torch.device) -> dict[str, Any]:
        """Made once ranks are connected. ValueError if they can't be divided so."""
        if self.replicate_size == 1:
            return {}
        size = dist.get_world_size() if dist.is_initialized() else 1
        if self.replicate_size < 1 or size % self.replicate_size:
            raise ValueError(f"replicate_size={self.replicate_size} does not divide {size} ranks")
        if self._mesh is None:
            shape = (self.replicate_size, size // self.replicate_size)
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        return {"process_group": self._mesh}

    def no_sync(self, module: nn.Module | None = None) -> AbstractContextManager[None]:
        """Of all optimizers, or of those that train parameters of ``module``."""
        return no_sync(self.optimizers if module is None else engines_of(self.optimizers, module.parameters()))

    def syncs(self, module: nn.Module) -> bool:
        """Whether a backward through ``module`` would send its gradients now."""
        held = [optimizer for optimizer in self.optimizers if optimizer.inside.grads.no_sync_depth]
        return not (held and engines_of(held, module.parameters()))


def _options() -> list[str]:
    """The constructor's options that are of zerox, and not of the rule or of the group."""
    names = list(inspect.signature(FusedShardedAdam).parameters)
    return [
        name for name in names[names.index("process_group") + 1 :] if name not in ("foreach", "fused", "differentiable")
    ]


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside Lightning's or Fabric's wrapper of it."""
    while "_optimizer" in vars(optimizer):
        optimizer = vars(optimizer)["_optimizer"]
    return optimizer


def scale_over_ranks(precision: Any) -> None:
    """Makes the scaler of a precision plugin a zerox.GradScaler, which finds inf and NaN on all ranks."""
    scaler = getattr(precision, "scaler", None)
    if not takes_all_ranks(scaler):
        raise TypeError(
            f"{type(scaler).__name__} does not know of gradients that other ranks have: use zerox.GradScaler"
        )
