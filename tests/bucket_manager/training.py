"""A small training that can be made to fail, for the tests of what goes wrong."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of, same_bits
from tests.own_state import own_state
from zerox import FusedShardedAdam

both_stages = pytest.mark.parametrize("stage", [1, 2])


class Training:
    """A model and its optimizer on this rank. ``fail_in``: its next backward raises in this layer."""

    def __init__(self, rank: int, stage: int, num_layers: int = 4, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.model = Chain(num_layers)
        self.optimizer = FusedShardedAdam(
            self.model.named_parameters(),
            lr=1e-2,
            process_group=group,
            stage=stage,
            bucket_cap_mb=LAYER_CAP / 2**20,
        )
        self.manager = self.optimizer.inside.manager

    def backward(self, seed: int, fail_in: int | None = None) -> None:
        x = input_of(self.rank, seed)
        for index, layer in enumerate(self.model.layers):
            x = layer(x).tanh()
            if index == fail_in:
                x.register_hook(self.fail)
        x.square().mean().backward()

    @staticmethod
    def fail(_: Tensor) -> None:
        raise ArithmeticError("injected")

    def snapshot(self) -> list[Tensor]:
        """Parameters and all of this rank's state."""
        state = [t for per_param in own_state(self.optimizer).values() for t in per_param.values()]
        return [t.detach().clone() for t in [*self.model.parameters(), *state]]

    def is_as(self, snapshot: list[Tensor]) -> bool:
        return all(same_bits(a, b) for a, b in zip(self.snapshot(), snapshot, strict=True))


def clean_run(rank: int, _: int, stage: int) -> list[Tensor]:
    training = Training(rank, stage)
    for seed in (0, 2, 3):
        training.backward(seed)
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.snapshot()
