"""A model on meta, an optimizer, a folder that transformers wrote: beside from_pretrained(), and back to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.meta.pretrained import KINDS, losses, maker, pretrained_twin
from tests.meta.rig import CAP, differing, on_meta
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load_weights, save_weights

pytest.importorskip("transformers")


def write(kind: str, tied: bool, folder: Path) -> None:
    """As a program of transformers does, whose experts' files are made with the model's own names."""
    model: Any = pretrained_twin(maker(kind, tied), seed=5)
    model.save_pretrained(folder, max_shard_size="40KB", save_original_format=False)


def from_files(rank: int, world_size: int, folder: Path, out: Path, kind: str, stage: int) -> None:
    make, its_class = maker(kind), type(on_meta(maker(kind)))
    for tied in (True, False):
        at = folder / str(tied)
        if rank == 0:
            write(kind, tied, at)
        torch.distributed.barrier()
        make = maker(kind, tied)
        model: Any = on_meta(make)
        optimizer = FusedShardedAdam(model.named_parameters(), stage=stage, model=model, bucket_cap_mb=CAP, lr=1e-2)
        load_weights(optimizer, at)
        other = its_class.from_pretrained(at).train()
        built = FusedShardedAdam(other.named_parameters(), stage=stage, bucket_cap_mb=CAP, lr=1e-2)
        assert losses(model.train(), optimizer, rank) == losses(other, built, rank)
        written = out / str(tied)
        save_weights(optimizer, written)
        if rank == 0:
            model.config.save_pretrained(written)
            read = its_class.from_pretrained(written)
        with optimizer.whole():
            assert rank > 0 or differing(model, read) == []
        torch.distributed.barrier()
        del optimizer, built


@pytest.mark.parametrize("kind", KINDS)
def test_three_lines_train_as_from_pretrained_does(tmp_path: Path, kind: str) -> None:
    run_ranks(from_files, 3, tmp_path / "in", tmp_path / "out", kind, 3)
