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
from torch.optim import optimizer as of_torch

from zerox.flow.compiled_regions import untraced

P = ParamSpec("P")
R = TypeVar("R")


def range_named(name: str) -> AbstractContextManager[Any]:
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def with_hooks(func: Callable[P, R]) -> Callable[P, R]:
    """``func``, a class's step(), as ``Optimizer.profile_hook_step`` wraps it."""
    hooked = Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(*args: P.args, **kwargs: P.kwargs) -> R:
        optimizer: Any = args[0]
        if (
            profiler._is_profiler_enabled
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or of_torch._global_optimizer_pre_hooks
            or of_torch._global_optimizer_post_hooks
        ):
            return hooked(*args, **kwargs)
        result = func(*args, **kwargs)
        optimizer._optimizer_step_code()  # for tracers of Python
        return result

    return untraced(step)
