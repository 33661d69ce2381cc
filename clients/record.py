"""What one rank of a script computes: losses, the first mean gradients, and the outputs of its evaluations."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from zerox.engine import Engine


class Record:
    """``num_backwards``: how many come before the first step(); None: find out."""

    def __init__(self, num_backwards: int | None) -> None:
        self.losses: list[float] = []
        self.evaluations: list[float] = []
        self.num_backwards = num_backwards
        self.optimizers: list[torch.optim.Optimizer] = []
        self.grads: list[Tensor | None] = []
        self.num_steps = 0
        self._depth = 0

    def begin(self) -> None:
        self._watch_backward()
        self._watch_optimizers()
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)

    def write(self, to: Path) -> None:
        if self.grads:
            torch.save(self.grads, to.with_suffix(".grads"))
        kept = ("losses", "evaluations", "num_backwards", "num_steps")
        to.with_suffix(".json").write_text(json.dumps({name: getattr(self, name) for name in kept}))

    def _watch_backward(self) -> None:
        backward = Tensor.backward

        @functools.wraps(backward)
        def watched(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.losses.append(float(loss.detach().sum()))
            backward(loss, *args, **kwargs)
            if self.num_steps == 0 and self.num_backwards in (None, len(self.losses)):
                self.grads = [mean_grad(each, param) for each in self.optimizers for param in params_of(each)]

        Tensor.backward = watched

    def _watch_optimizers(self) -> None:
        init = torch.optim.Optimizer.__init__

        @functools.wraps(init)
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            is_known = any(optimizer is each for each in self.optimizers)  # Fabric's becomes one of zerox in place
            if not is_known and (isinstance(optimizer, Engine) or not _is_in_zerox()):
                self.optimizers.append(optimizer)

        torch.optim.Optimizer.__init__ = noted
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        if self.num_steps == 0 and self.num_backwards is None:
            self.num_backwards = len(self.losses)
        self.num_steps += 1

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and not torch.is_grad_enabled():
            tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
            self.evaluations.append(sum(float(each.double().abs().mean()) for each in tensors))


def _is_in_zerox() -> bool:
    """Whether zerox calls: ShardedOptimizer builds optimizers for its parts of the parameters, and to try the class."""
    frame = sys._getframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("zerox."):
        frame = frame.f_back
    return frame is not None


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def mean_grad(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor | None:
    """Over the ranks, as the optimizer would take it. Collective for those of zerox. A sparse one as it lies there."""
    if isinstance(optimizer, Engine) and param.requires_grad and not (param.grad is not None and param.grad.is_sparse):
        grad = optimizer.full_grad(param)
    else:
        grad = param.grad
    return None if grad is None else grad.detach().clone().to_dense()
