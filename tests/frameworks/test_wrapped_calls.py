"""What users call on the optimizers that Lightning and Fabric hand out reaches the optimizer inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from tests.frameworks.lightning_rig import Module, Ranks, data, trainer
from tests.optimizer.wrapper_cases import CASES, train
from tests.ranks import run_ranks


class Running(Module):
    """Runs a case inside a fit, with what self.optimizers() gives."""

    def __init__(self, rank: int, case: Callable[..., None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rank, self.case = rank, case
        self.found: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> None:
        def wrap(optimizer: torch.optim.Optimizer) -> Any:
            self.trainer.strategy.optimizers = [self.trainer.strategy.sharding.take(optimizer, self.device)]
            return self.optimizers()

        self.found = train(self.rank, self.case, wrap)


def under_lightning(rank: int, world_size: int, case: Callable[..., None]) -> list[Tensor]:
    module = Running(rank, case)
    trainer(rank, world_size, "zerox", limit_train_batches=1).fit(module, data())
    return module.found


def under_fabric(rank: int, world_size: int, case: Callable[..., None]) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="zerox", plugins=[Ranks(rank, world_size)])
    fabric.launch()
    return train(rank, case, fabric.setup_optimizers)


def alone(rank: int, world_size: int, case: Callable[..., None]) -> list[Tensor]:
    return train(rank, case, lambda optimizer: optimizer)


@pytest.mark.parametrize("framework", [under_lightning, under_fabric], ids=lambda each: each.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_call_on_what_a_framework_hands_out_is_one_on_the_optimizer(
    case: Callable[..., None], framework: Callable[..., list[Tensor]]
) -> None:
    for own, others in zip(run_ranks(alone, 2, case), run_ranks(framework, 2, case), strict=True):
        assert len(own) == len(others)
        assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))
