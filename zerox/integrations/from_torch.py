"""An optimizer of torch's kind becomes one of zerox's: the same object, which schedulers and users go on holding."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch

from zerox.engine import Engine
from zerox.optimizers import FusedShardedAdam, FusedShardedSGD, ShardedOptimizer

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
