"""Figures of each step, for the loggers of Lightning and Fabric."""

from __future__ import annotations

from zerox.integrations.lightning_strategies import OLDEST
from zerox.integrations.requirements import check_version
from zerox.integrations.watch import LoggedFigures

check_version("lightning", OLDEST, "pytorch_lightning")
from lightning.pytorch import Callback


class WatchCallback(LoggedFigures, Callback):
    """Gives :class:`zerox.integrations.watch.Watch`'s figures to the loggers of a Trainer, or of Fabric.

    ``Trainer(callbacks=[WatchCallback()])``, ``Fabric(callbacks=[WatchCallback()], loggers=...)``. Names are
    ``zerox/grad_norm`` and so on; with several optimizers ``zerox/0/grad_norm``. Rank 0's are logged, as loggers do.

    Args:
        norm: under a Trainer that does not clip by norm, compute the norm in each step: one more message. All ranks
            must pass the same.
        every: log each that many steps; None: the Trainer's ``log_every_n_steps``, and all under Fabric.
        resets_peak: as in Watch.
    """
