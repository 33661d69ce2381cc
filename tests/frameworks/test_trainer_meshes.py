"""Trainer with a ParallelismConfig for hybrid sharding, beside DistributedDataParallel and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.utils import ParallelismConfig
from transformers import Trainer

from tests.frameworks.trainers import Noted, ZeroxTrainer, train
from tests.ranks import run_ranks
from zerox.engine import Engine

SEEN: list[list[int]] = []


class Watched(ZeroxTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        assert isinstance(optimizer, Engine)
        SEEN.append([len(axis.members) for axis in optimizer.inside.ranks.axes])
        return optimizer


def on_a_mesh(rank: int, world_size: int, folder: Path) -> tuple[Noted, list[int]]:
    """Accelerate itself refuses a ParallelismConfig on CPUs."""
    SEEN.clear()
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        noted = train(rank, world_size, Watched, folder, {"parallelism_config": config}, {})
    return noted, SEEN[0]


def test_trainer_trains_over_a_mesh(tmp_path: Path) -> None:
    ours = run_ranks(on_a_mesh, 4, tmp_path / "ours")
    theirs = run_ranks(train, 4, Trainer, tmp_path / "theirs", {}, {})
    for (own, axes), other in zip(ours, theirs, strict=True):
        assert axes == [2, 2]
        assert own.norms == pytest.approx(other.norms, rel=1e-5)
        for name in own.weights:  # gradients of four ranks are added up in another order
            far = float((own.weights[name] - other.weights[name]).abs().max())
            assert far <= (2e-5 if name.endswith("bias") else 5e-6), name
