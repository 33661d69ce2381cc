"""torch's base class of optimizers, without what it imports for Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from zerox import _torch


class TorchOptimizer(torch.optim.Optimizer):
    """Keeps Dynamo out of a process that compiles nothing.

    torch wraps methods of its base class, so that Dynamo does not compile them. The wrapper imports torch._dynamo, and
    torch.distributed.tensor with it: 820 modules and more than a second, in the first optimizer of a process.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _of_torch("add_param_group")(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = _of_torch("state_dict")(self)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _of_torch("load_state_dict")(self, state_dict)


def _of_torch(name: str) -> Callable[..., Any]:
    """The method of the base class; where nothing has imported Dynamo, what torch wrapped."""
    method: Callable[..., Any] = getattr(torch.optim.Optimizer, name)
    return method if "torch._dynamo" in sys.modules else _torch.without_dynamo(method)
