"""The same as zerox.integrations.lightning, for scripts that say ``import pytorch_lightning`` or ``lightning_fabric``.

It stands where ``strategy="ddp"`` stood. Optimizers of torch become zerox's (sharding.py), and no wrapper is put
around the model.
"""

from __future__ import annotations

from zerox.integrations import lightning_strategies as ours
from zerox.integrations.requirements import check_version

check_version("pytorch_lightning", ours.OLDEST, "lightning")  # before its names are looked for
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.core import optimizer as wrappers
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

ours.check_package("pytorch_lightning", DDPStrategy, Precision, wrappers, FabricDDPStrategy)


class ZeroxStrategy(ours.TrainerStrategy, DDPStrategy):
    """:class:`zerox.integrations.lightning.ZeroxStrategy` for pytorch_lightning's Trainer."""

    PRECISION = Precision


class ZeroxFabricStrategy(ours.FabricStrategy, FabricDDPStrategy):
    """:class:`zerox.integrations.lightning.ZeroxFabricStrategy` for lightning_fabric's Fabric."""


ours.register(StrategyRegistry, ZeroxStrategy)
ours.register(STRATEGY_REGISTRY, ZeroxFabricStrategy)
