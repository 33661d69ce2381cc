"""What each step took and did, for a log, without waiting for it."""

from __future__ import annotations

import resource
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox.engine import Engine
from zerox.integrations.sharding import unwrap

MOST_KEPT = 1000  # steps


class Figures(NamedTuple):
    """Of one step. ``norm`` may still be on its way from a device."""

    step: int
    numbers: dict[str, float]
    norm: Arriving | None

    def complete(self) -> dict[str, float]:
        return self.numbers if self.norm is None else {"grad_norm": self.norm.value(), **self.numbers}


class Watch:
    """Keeps figures of each ``optimizer.step()``. Local, and the host waits for no device.

    ``take()`` gives those that are known, by step: the number of ``step()`` calls that this optimizer has made.

    ``grad_norm``
        the 2-norm of the whole mean gradient, before it was clipped, if it was asked for in this step by
        ``clip_grad_norm_()``. ``optimizer.clip_grad_norm_(float("inf"))`` asks, and clips nothing.
    ``skipped_steps``
        how many steps a ``GradScaler`` has skipped so far. These have no figures of their own.
    ``step_ms``
        from the end of the last step to the end of this one.
    ``exposed_ms``
        how much of it this rank's threads waited for gradients and parameters to be exchanged, with what they do for
        that themselves. Over NCCL streams wait and not threads: use a profiler there.
    ``resident_bytes``
        the most bytes of parameters that were whole on this rank at a time since the last step.
    ``peak_bytes``
        on a CUDA device the most bytes that torch's allocator has given out at a time, since they were last reset; on
        the CPU the most memory that this process has had, of whatever kind.

    ``resets_peak``: reset CUDA's count at each step, so that ``peak_bytes`` is of the step alone. Others in this
    process who read that count then see it reset too. What a CUDA graph replays is not seen. Figures of the last 1,000
    steps are kept until they are taken.
    """

    def __init__(self, optimizer: Engine, *, resets_peak: bool = False) -> None:
        if not isinstance(optimizer, Engine):
            raise TypeError(f"Watch is for optimizers of zerox, got {type(optimizer).__name__}")
        self._kept: deque[Figures] = deque(maxlen=MOST_KEPT)
        self._resets_peak = resets_peak
        self._waited_ns = optimizer.inside.waited_ns
        self._stepped_at = time.perf_counter()
        optimizer.inside.take_most_resident_bytes()
        to_self = weakref.ref(self)

        def note(stepped: Any, *_: Any) -> None:
            watch = to_self()
            if watch is not None:
                watch._note(stepped)

        self._handle = optimizer.register_step_post_hook(note)

    def take(self, wait: bool = False) -> list[tuple[int, dict[str, float]]]:
        """``(step, figures)`` of steps that were not taken yet, in order, up to the first that a device still computes.

        ``wait``: for that too, as at the end of a training.
        """
        taken = []
        while self._kept and (wait or self._kept[0].norm is None or self._kept[0].norm.is_there()):
            figures = self._kept.popleft()
            taken.append((figures.step, figures.complete()))
        return taken

    def write_to(self, log: Callable[[str, float, int], object], prefix: str = "zerox/", wait: bool = False) -> None:
        """Calls ``log(name, value, step)`` for each figure that take() gives, as ``SummaryWriter.add_scalar``."""
        for step, figures in self.take(wait):
            for name, value in figures.items():
                log(prefix + name, value, step)

    def close(self) -> None:
        """Keeps no more figures."""
        self._handle.remove()

    def _note(self, optimizer: Engine) -> None:
        inside = optimizer.inside
        now, waited_ns = time.perf_counter(), inside.waited_ns
        numbers = {
            "skipped_steps": float(inside.calls.record.num_skipped),
            "step_ms": (now - self._stepped_at) * 1e3,
            "exposed_ms": (waited_ns - self._waited_ns) / 1e6,
            "resident_bytes": float(inside.take_most_resident_bytes()),
            "peak_bytes": float(_peak_bytes(inside.ranks.device, self._resets_peak)),
        }
        self._stepped_at, self._waited_ns = now, waited_ns
        norm = inside.calls.record.norm
        self._kept.append(Figures(inside.calls.record.num_steps, numbers, None if norm is None else Arriving(norm)))


class Arriving:
    """A scalar's copy on its way to the host."""

    def __init__(self, scalar: Tensor) -> None:
        self._event: Any = None
        self._value: Tensor | float
        if scalar.device.type == "cpu":
            self._value = float(scalar)
        else:
            self._value = scalar.to("cpu", non_blocking=True)
            self._event = torch.Event(scalar.device)
            self._event.record()

    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> float:
        """Waits."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


def _peak_bytes(device: torch.device, resets: bool) -> int:
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated(device)
    if resets:
        torch.cuda.reset_peak_memory_stats(device)
    return peak


class LoggedFigures:
    """Comes before that package's Callback."""

    def __init__(self, norm: bool = True, every: int | None = None, resets_peak: bool = False) -> None:
        self.norm = norm
        self.every = every
        self.resets_peak = resets_peak
        self.watches: list[Watch] = []
        self.fabric: Any = None

    # ---- of a Trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._watch(trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        optimizer = unwrap(optimizer)
        by_norm = trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm")
        if self.norm and isinstance(optimizer, Engine) and not (by_norm and pl_module.automatic_optimization):
            optimizer.clip_grad_norm_(float("inf"))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._log(trainer.loggers, trainer.log_every_n_steps, wait=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer.loggers, trainer.log_every_n_steps, wait=True)
        self._watch([])

    # ---- of Fabric

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        self.fabric = fabric
        sharding = getattr(fabric.strategy, "sharding", None)
        self._watch([] if sharding is None else sharding.optimizers)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        if self.fabric is not None:
            self._log(self.fabric.loggers, 1, wait=False)

    # ---- inside

    def _watch(self, optimizers: list[Any]) -> None:
        for watch in self.watches:
            watch.close()
        found = [unwrap(optimizer) for optimizer in optimizers]
        engines = [optimizer for optimizer in found if isinstance(optimizer, Engine)]
        self.watches = [Watch(engine, resets_peak=self.resets_peak) for engine in engines]

    def _log(self, loggers: list[Any], every: int, wait: bool) -> None:
        for index, watch in enumerate(self.watches):
            prefix = "zerox/" if len(self.watches) == 1 else f"zerox/{index}/"
            for step, figures in watch.take(wait):
                if step % (self.every or every) == 0:
                    for logger in loggers:
                        logger.log_metrics({prefix + name: value for name, value in figures.items()}, step=step)
