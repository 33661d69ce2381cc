"""What goes wrong in a training that nobody checks, planted in the unchanged script: a comparison that misses it shows
nothing."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def plant(fault: str) -> None:
    """ "beta": another decay of a moment. "averaging": each rank has its own gradients. "frozen": one rank's parameters
    that are not trained are others. "forgets": an optimizer's state is not loaded."""
    planted = {"beta": _another_beta, "averaging": _no_averaging, "frozen": _unequal_frozen, "forgets": _forgets}
    planted[fault]()


def _another_beta() -> None:
    """In each step anew: scripts set momenta as they set rates."""
    kept: list[list[Any]] = []

    def lower(optimizer: Any, *_: Any) -> None:
        names = [_decay_in(group) for group in optimizer.param_groups]
        kept.append([group[name] for group, name in zip(optimizer.param_groups, names, strict=True)])
        for group, name in zip(optimizer.param_groups, names, strict=True):
            value = group[name]
            group[name] = (value[0] - 0.1, *value[1:]) if name == "betas" else value - 0.1

    def restore(optimizer: Any, *_: Any) -> None:
        for group, value in zip(optimizer.param_groups, kept.pop(), strict=True):
            group[_decay_in(group)] = value

    register_optimizer_step_pre_hook(lower)
    register_optimizer_step_post_hook(restore)


def _decay_in(group: dict[str, Any]) -> str:
    """ "rho": Adadelta's."""
    return next(name for name in ("betas", "momentum", "rho") if name in group)


def _no_averaging() -> None:
    init, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward

    @functools.wraps(init)
    def without_static_graph(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "static_graph": False})  # which fails if its first forward is in no_sync()

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return forward(self, *args, **kwargs)

    DistributedDataParallel.__init__, DistributedDataParallel.forward = without_static_graph, wrapped


@torch.no_grad()
def _unequal_frozen() -> None:
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def wrapped(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        init(self, module, *args, **kwargs)
        for param in module.parameters():
            if not param.requires_grad and dist.get_rank() == 1:
                param.data.mul_(1.01)

    DistributedDataParallel.__init__ = wrapped


def _forgets() -> None:
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        self.state.clear()

    torch.optim.Optimizer.load_state_dict = wrapped
