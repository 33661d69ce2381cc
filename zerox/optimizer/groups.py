"""What torch keeps of an optimizer and users may replace: its param groups and its state. On this rank alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Member
from zerox.memory.torch_optimizer import TorchOptimizer
from zerox.options import OptimizerOptions
from zerox.ranks.subgroups import own_group
from zerox.ranks.wrapped import bare_names
from zerox.rules.of_groups import RULE, Rules

NAMES = "param_names"  # of a group, where parameters were given with names


class Groups:
    """``frozen``: parameters that have no bucket. ``seen``: the parameters of each group, as ranks know them.
    ``model()``: that which the constructor was given, if it lives."""

    def __init__(self, optimizer: TorchOptimizer, rules: Rules, options: OptimizerOptions) -> None:
        self._optimizer: Any = weakref.ref(optimizer)
        self.rules = rules
        self.options = options
        self.frozen: list[Member] = []
        self.seen: list[list[Tensor]] = []
        self.model: Callable[[], torch.nn.Module | None] = lambda: None

    @property
    def optimizer(self) -> TorchOptimizer:
        """Only while a call on it runs: nothing of ours keeps it."""
        found: TorchOptimizer = self._optimizer()
        return found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._optimizer().param_groups
        return found

    @property
    def state(self) -> Any:
        return self._optimizer().state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer().state = state

    def add(self, param_group: Any) -> None:
        """As torch. A group that is refused is not added."""
        optimizer = self.optimizer
        if isinstance(param_group, dict):  # anything else torch refuses
            param_group = own_group(param_group)
            self.complete(param_group, len(optimizer.param_groups))
        TorchOptimizer.add_param_group(optimizer, param_group)
        group = optimizer.param_groups[-1]
        if NAMES in group:
            group[NAMES] = bare_names(group[NAMES], group["params"])
        self.check(group)

    def complete(self, group: dict[str, Any], index: int) -> None:
        self.options.check_pairs({RULE: self.rules.default.name, **group})
        self.rules.complete(group, f"param group {index}", self.optimizer.defaults)

    def check(self, group: dict[str, Any]) -> None:
        """Once torch's defaults are in it."""
        self.rules.clear_options(group)
        self.rules.of(group).check(group)
        self.options.check_group(group, self.rules.of(group).defaults)

    def divisors(self) -> list[float | None]:
        return [self.options.divisor_of(group) for group in self.param_groups]

    def note_seen(self) -> None:
        self.seen = [list(group["params"]) for group in self.param_groups]

    @property
    def are_as_seen(self) -> bool:
        groups, seen = self.param_groups, self.seen
        return len(groups) == len(seen) and all(map(_has_same, groups, seen))


def _has_same(group: Mapping[str, Any], seen: list[Tensor]) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and C.has_same_objects(params, seen)
