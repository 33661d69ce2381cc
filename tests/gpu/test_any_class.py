"""ShardedOptimizer on one device: the bits of the class unsharded on the same device.

tests/accelerator leaves it out, since the fake accelerator knows none of torch's operators.
"""

from __future__ import annotations

import pytest
import torch

from tests.local_optimizers.classes import ELEMENTWISE, Lamb
from tests.local_optimizers.test_bits import ALL, Pair, Plain
from zerox import ShardedOptimizer


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_class_has_its_bits(
    device: torch.device, name: str, dtype: torch.dtype, foreach: bool
) -> None:
    pair = Pair(0, 1, name, dtype, Plain().to(device), foreach=foreach)
    for number in range(3):
        pair.step(number, branch=number == 1)


@pytest.mark.parametrize("name", ["SGD, momentum", "Python's numbers", "counting", "writes gradients"])
@pytest.mark.parametrize("stage", [1, 2])
def test_scaled_gradients_and_odd_classes_too(device: torch.device, name: str, stage: int) -> None:
    assert name in ALL
    pair = Pair(0, 1, name, torch.float32, Plain().to(device), stage=stage)
    for number in range(3):
        pair.step(number, branch=True, clip=0.01 if name == "SGD, momentum" else None)


def test_what_is_not_elementwise_is_refused_there(device: torch.device) -> None:
    with pytest.raises(ValueError, match="Lamb can't be sharded: it is not elementwise"):
        ShardedOptimizer(Plain().to(device).parameters(), Lamb)
