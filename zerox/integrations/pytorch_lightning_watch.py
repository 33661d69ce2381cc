"""Figures of each step, for the loggers of pytorch_lightning and lightning_fabric."""

from __future__ import annotations

from zerox.integrations.lightning_strategies import OLDEST
from zerox.integrations.requirements import check_version
from zerox.integrations.watch import LoggedFigures

check_version("pytorch_lightning", OLDEST, "lightning")
from pytorch_lightning import Callback


class WatchCallback(LoggedFigures, Callback):
    """:class:`zerox.integrations.lightning_watch.WatchCallback` for these."""
