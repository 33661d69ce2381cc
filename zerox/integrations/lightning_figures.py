"""What the callback for Lightning does, whichever of its packages it is for."""

from __future__ import annotations

from typing import Any

from zerox.engine import Engine
from zerox.integrations.sharding import unwrap
from zerox.integrations.watch import Watch


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
