"""torch's ranges for profilers, and its hooks, around an optimizer's calls: only where there is something to see them.

To open a range takes as long as a third of the Python of step(), and more where the caches are cold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from torch.autograd import profiler
from torch.optim import Optimizer

from zerox import _torch
from zerox.params.compiled_regions import untraced

P = ParamSpec("P")
R = TypeVar("R")


NO_RANGE: AbstractContextManager[Any] = nullcontext()


def range_named(name: str) -> AbstractContextManager[Any]:
    return profiler.record_function(name) if _torch.profiler_is_on() else NO_RANGE


def range_of_zero_grad(optimizer: Optimizer) -> AbstractContextManager[Any]:
    return range_named(_torch.zero_grad_name(optimizer)) if _torch.profiler_is_on() else NO_RANGE


def with_hooks(func: Callable[P, R]) -> Callable[P, R]:
    """``func``, a class's step(), as ``Optimizer.profile_hook_step`` wraps it."""
    hooked = Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(*args: P.args, **kwargs: P.kwargs) -> R:
        optimizer: Any = args[0]
        if _torch.profiler_is_on() or _torch.has_step_hooks(optimizer):
            return hooked(*args, **kwargs)
        result = func(*args, **kwargs)
        _torch.trace_step(optimizer)
        return result

    return untraced(step)
