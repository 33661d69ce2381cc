"""When masks change, and how many elements they keep then."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """``changes(step)``: whether masks change after this step, counted from 1; step 0 is the construction.

    ``part(step)``: of the sparsity that is asked for, what there is from then on, 0 to 1. ``renewed(step)``: of the
    elements that are kept, what is dropped at that change, for as many others to grow. ``grows_by``: what decides which
    ones: "gradient" or "chance"; empty: none.
    """

    name: str
    changes: Callable[[int], bool]
    part: Callable[[int], float]
    renewed: Callable[[int], float] = lambda step: 0.0
    grows_by: str = ""


def at_once() -> Schedule:
    """Masks are chosen when the Sparsity is built, and stay."""
    return Schedule("at once", lambda step: step == 0, lambda step: 1.0)


def cubic(start: int, end: int, every: int = 100) -> Schedule:
    """From dense at step ``start`` to the sparsity that is asked for at ``end``, with a change each ``every`` steps.

    What there is after step t is ``1 - (1 - (t - start) / (end - start))**3`` of it: Zhu and Gupta, "To prune, or not
    to prune" (2017), equation 1, from an initial sparsity of 0. Raises ValueError unless ``0 <= start < end``.
    """
    _check_every(every)
    if not 0 <= start < end:
        raise ValueError(f"cubic(): 0 <= start < end must hold, got start={start} and end={end}")

    def changes(step: int) -> bool:
        return step == end or (start < step < end and (step - start) % every == 0)

    def part(step: int) -> float:
        done = min(max((step - start) / (end - start), 0.0), 1.0)
        return float(1.0 - (1.0 - done) ** 3)

    return Schedule(f"cubic(start={start}, end={end}, every={every})", changes, part)


def rigl(fraction: float = 0.3, every: int = 100, until: int = 10_000) -> Schedule:
    """Sparse from the start; at each change the smallest weights that are kept make room for others.

    After each ``every`` steps before ``until``, ``fraction / 2 * (1 + cos(pi * t / until))`` of each tensor's kept
    elements are dropped, and as many of those that were masked grow, from 0: those with the largest gradients. Evci et
    al., "Rigging the Lottery" (2020), where a step with a dense gradient is made for it: here the owner of a shard has
    the dense mean of every step. Raises ValueError for a ``fraction`` outside (0, 1).
    """
    return _renewing("rigl", fraction, every, until, "gradient")


def set_(fraction: float = 0.3, every: int = 100, until: int = 10_000) -> Schedule:
    """As :func:`rigl`, but which elements grow is left to chance: Mocanu et al. (2018), "SET".

    The chance of an element hangs on its parameter's name, its place and the step: it is the same at any number of
    ranks, and in every run.
    """
    return _renewing("set_", fraction, every, until, "chance")


def _renewing(name: str, fraction: float, every: int, until: int, grows_by: str) -> Schedule:
    _check_every(every)
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"{name}(): fraction must be between 0 and 1, got {fraction}")
    if until < 1:
        raise ValueError(f"{name}(): until must be 1 or more, got {until}")

    def changes(step: int) -> bool:
        return step == 0 or (step < until and step % every == 0)

    def renewed(step: int) -> float:
        return 0.0 if step == 0 else fraction / 2 * (1 + math.cos(math.pi * step / until))

    text = f"{name}(fraction={fraction}, every={every}, until={until})"
    return Schedule(text, changes, lambda step: 1.0, renewed, grows_by)


def _check_every(every: int) -> None:
    if every < 1:
        raise ValueError(f"every must be 1 or more, got {every}")
