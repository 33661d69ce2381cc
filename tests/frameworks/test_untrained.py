"""A module that no optimizer of zerox trains is told of: nobody averages its gradients over the ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from tests.frameworks.lightning_rig import Module, data, run, trainer
from tests.frameworks.test_fabric import adamw, loss_of, make_fabric, make_model

WARNING = "to train and no optimizer of zerox with its parameters"


class OwnOptimizer(Module):
    """As of a user who left configure_optimizers() out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = adamw(self.net)

    def training_step(self, batch: Any, _: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self) -> None:
        return None


def fabric_told(rank: int, world_size: int, given: bool) -> list[str]:
    fabric = make_fabric(rank, world_size, "zerox")
    trained, teacher = make_model(), nn.Linear(6, 6)
    optimizer = adamw(trained)
    fabric.setup_module(teacher.requires_grad_(False))
    model = fabric.setup_module(trained)
    if given:
        optimizer = fabric.setup_optimizers(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            fabric.backward(loss_of(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if WARNING in str(each.message)]


def lightning_told(rank: int, world_size: int, given: bool) -> list[str]:
    module = Module() if given else OwnOptimizer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(rank, world_size, "zerox").fit(module, data())
    return [str(each.message) for each in caught if WARNING in str(each.message)]


TOLD = {
    "Fabric": (fabric_told, "Fabric has Sequential to train", "give its optimizer to fabric.setup()"),
    "Lightning": (lightning_told, "has OwnOptimizer to train", "return its optimizer from configure_optimizers()"),
}


@pytest.mark.parametrize("framework", TOLD)
def test_a_module_that_nobody_averages_is_told_of_once(framework: str) -> None:
    function, what, way_out = TOLD[framework]
    for said in run(function, 2, False):
        [warning] = said
        assert what in warning
        assert way_out in warning
    assert run(function, 2, True) == [[], []]
    assert run(function, 1, False) == [[]], "one rank has nobody to average with"
