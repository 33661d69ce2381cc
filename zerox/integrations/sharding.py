"""The zerox optimizers of a framework's strategy, and how an optimizer of torch becomes one, in place."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zerox.engine import Engine
from zerox.integrations.engines import engines_of, no_sync, takes_all_ranks
from zerox.integrations.on_meta import given_model
from zerox.optimizers import FusedShardedAdam, FusedShardedSGD, ShardedOptimizer

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

    def take(
        self, optimizer: torch.optim.Optimizer, device: torch.device, model: nn.Module | None = None
    ) -> torch.optim.Optimizer:
        """Makes it one of zerox's, if it is none. ``model``: may be on the meta device. Collective."""
        optimizer = unwrap(optimizer)
        if type(optimizer).__name__ == "_MockOptimizer":  # Lightning's own, for a module that has none
            return optimizer
        if not isinstance(optimizer, Engine):
            optimizer = become_sharded(
                optimizer, {**self.options, **self._group(device), **({} if model is None else given_model(model))}
            )
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


OURS: dict[type[torch.optim.Optimizer], type[Engine]] = {
    torch.optim.AdamW: FusedShardedAdam,
    torch.optim.Adam: FusedShardedAdam,
    torch.optim.SGD: FusedShardedSGD,
}


def become_sharded(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> Engine:
    """Makes ``optimizer`` a zerox one with these constructor ``options``, in place. Collective.

    AdamW and Adam become FusedShardedAdam, SGD becomes FusedShardedSGD, and another class trains inside
    ShardedOptimizer. Param groups, state and hooks stay, and schedulers go on. Raises as the constructor does, and then
    the optimizer is as it was.
    """
    own = type(optimizer)
    if own.__name__ == "ZeroRedundancyOptimizer":  # whose module takes long to import
        kind = type(optimizer.optim)  # type: ignore[attr-defined]
        raise ValueError(
            f"zerox: ZeroRedundancyOptimizer shards the state of {kind.__name__} over the ranks itself, which is what "
            f"zerox does: build {kind.__name__} without it"
        )
    before = dict(vars(optimizer))
    groups = [_group(group) for group in optimizer.param_groups]
    is_fused = own in OURS
    if is_fused:  # there it is an option of the whole optimizer
        graphs = [group.pop("capturable", False) for group in groups]
    hooks = {name: value for name, value in before.items() if name.endswith("_hooks")}
    state = optimizer.state_dict() if optimizer.state else None
    target: type[Engine] = OURS.get(own, ShardedOptimizer)
    asked = dict(optimizer.defaults) if is_fused else _arguments(own, optimizer.defaults)
    if is_fused and any(graphs):
        asked["capturable"] = True
    asked |= options
    is_counted = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    vars(optimizer).clear()
    optimizer.__class__ = target
    try:
        if target is ShardedOptimizer:
            ShardedOptimizer.__init__(optimizer, groups, own, **asked)  # type: ignore[arg-type]
        else:
            target.__init__(optimizer, groups, **asked)  # type: ignore[arg-type]
        if state is not None:
            optimizer.load_state_dict(state)
    except BaseException:
        optimizer.__class__ = own
        vars(optimizer).clear()
        vars(optimizer).update(before)
        raise
    for name, each in hooks.items():
        getattr(optimizer, name).update(each)
    if is_counted:
        _count_steps(optimizer)
    assert isinstance(optimizer, Engine)
    return optimizer


def _group(group: dict[str, Any]) -> dict[str, Any]:
    names = group.get("param_names")
    params = list(group["params"]) if names is None else list(zip(names, group["params"], strict=True))
    return {**{key: value for key, value in group.items() if key != "param_names"}, "params": params}


def _arguments(cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What to call the class with, to have these defaults. ValueError if that can't be told."""
    known = inspect.signature(cls).parameters
    missing = [
        name
        for name, parameter in list(known.items())[1:]
        if name not in defaults
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise ValueError(
            f"{cls.__name__} does not keep its argument {missing[0]!r} among its defaults, so zerox can't make another "
            f"one like it: build zerox.ShardedOptimizer(params, {cls.__name__}, {missing[0]}=..., ...) yourself"
        )
    return {name: value for name, value in defaults.items() if name in known}


def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    """As torch's schedulers do to an optimizer's step(), to know that it was called before theirs."""
    to_self = weakref.ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = to_self()
        assert found is not None
        found._opt_called = True  # type: ignore[attr-defined]
        return type(found).step(found, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
