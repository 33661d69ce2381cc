"""``strategy="zerox"`` for Lightning's Trainer and for Fabric: importing this module registers it with both.

It stands where ``strategy="ddp"`` stood. Optimizers of torch become zerox's (sharding.py), and no wrapper is put
around the model. ``import zerox`` imports nothing of this.
"""

from __future__ import annotations

from zerox.integrations import lightning_strategies as ours
from zerox.integrations.requirements import check_version

check_version("lightning", ours.OLDEST, "pytorch_lightning")  # before its names are looked for
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.core import optimizer as wrappers
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

ours.check_package("lightning", DDPStrategy, Precision, wrappers, FabricDDPStrategy)


class ZeroxStrategy(ours.TrainerStrategy, DDPStrategy):
    """Trains a LightningModule with zerox: ``Trainer(strategy=ZeroxStrategy(stage=3))``, or ``strategy="zerox"``.

    What ``configure_optimizers()`` returns may be of torch: AdamW, Adam and SGD become zerox's own, others train inside
    ShardedOptimizer. It is the same object afterwards, so that schedulers keep it.

    Args:
        stage: of ZeRO, 1, 2 (default) or 3.
        replicate_size: hybrid sharding: into how many parts ranks are divided, of a machine or more each; gradients are
            added up inside them first (docs/meshes.md).
        broadcast_buffers: all ranks take rank 0's buffers before a forward, as with DistributedDataParallel.
        process_group_backend, timeout, start_method, and the five after it: as in Lightning's DDPStrategy.
        options: ``state_dtype``, ``reduce_dtype``, ``master_weights``, ``resident_mb`` ..., of
            :class:`zerox.FusedShardedAdam`, for the optimizers that are made.

    Raises TypeError for an option that there is not; in fit(), ValueError for options beside an optimizer of zerox.
    """

    PRECISION = Precision


class ZeroxFabricStrategy(ours.FabricStrategy, FabricDDPStrategy):
    """Trains with zerox under Fabric: ``Fabric(strategy=ZeroxFabricStrategy(stage=3))``, or ``strategy="zerox"``.

    ``fabric.setup(model, optimizer)`` makes an optimizer of torch zerox's, as :class:`ZeroxStrategy` does, once the
    model is on its device. The arguments are that class's.
    """


ours.register(StrategyRegistry, ZeroxStrategy)
ours.register(STRATEGY_REGISTRY, ZeroxFabricStrategy)
