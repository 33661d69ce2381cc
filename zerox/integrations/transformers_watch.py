"""Figures of each step, for transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerox.engine import Engine
from zerox.integrations.requirements import check_version
from zerox.integrations.watch import Watch

check_version("transformers", "5.20")
from transformers import TrainerCallback


class WatchCallback(TrainerCallback):
    """Adds :class:`zerox.integrations.watch.Watch`'s figures to what Trainer logs: ``Trainer(callbacks=[...])``.

    Each log has those of the last step that is known, under ``zerox/exposed_ms`` and so on, in ``state.log_history``
    and for callbacks that come after this one. What ``report_to=`` reports to comes before it: give it ``log`` here,
    which is called with name, value and step for each figure of each step, as ``SummaryWriter.add_scalar`` is.
    ``resets_peak``: as in Watch. There is a ``grad_norm`` where zerox's own clip is used, as it is with
    zerox.integrations.transformers.
    """

    def __init__(self, log: Callable[[str, float, int], object] | None = None, resets_peak: bool = False) -> None:
        self.log = log
        self.resets_peak = resets_peak
        self.watch: Watch | None = None
        self.last: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._begin(optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.watch is None:
            self._begin(optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take(wait=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        figures = {f"zerox/{name}": value for name, value in self.last.items()}
        if logs is not None:
            logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take(wait=True)
        if self.watch is not None:
            self.watch.close()
        self.watch = None

    def _begin(self, optimizer: Any) -> None:
        while not isinstance(optimizer, Engine) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if isinstance(optimizer, Engine):
            self.watch = Watch(optimizer, resets_peak=self.resets_peak)

    def _take(self, wait: bool) -> None:
        for step, figures in self.watch.take(wait) if self.watch is not None else ():
            self.last = figures
            if self.log is not None:
                for name, value in figures.items():
                    self.log(f"zerox/{name}", value, step)
