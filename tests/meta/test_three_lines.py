"""A model on meta, an optimizer, a folder that transformers wrote: beside from_pretrained(), and back to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zerox
from tests.meta.pretrained import KINDS, config_of, losses, maker, pretrained_twin
from tests.meta.rig import CAP, differing, on_meta
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load_weights, save_weights

pytest.importorskip("transformers")


def write(kind: str, tied: bool, folder: Path) -> None:
    """As a program of transformers does: experts that the model has in one tensor are many in files, or as it is."""
    model: Any = pretrained_twin(maker(kind, tied), seed=5)
    model.save_pretrained(folder, max_shard_size="40KB", save_original_format=tied)


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


ROOT = Path(__file__).parents[2]


def runs_the_docs_lines(rank: int, world_size: int, folder: Path) -> None:
    import transformers

    if rank == 0:
        write("llama", True, folder)
    torch.distributed.barrier()
    page = (ROOT / "docs/sharded-parameters.md").read_text()
    [lines] = [each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "load_weights" in each]
    names: dict[str, Any] = {
        "torch": torch,
        "transformers": transformers,
        "zerox": zerox,
        "config": config_of("llama"),
        "folder": folder,
    }
    exec(compile(lines, "docs", "exec"), names)
    model, optimizer = names["model"], names["optimizer"]
    with optimizer.whole():
        assert differing(model, type(model).from_pretrained(folder)) == []


def test_the_lines_of_the_docs_are_these(tmp_path: Path) -> None:
    run_ranks(runs_the_docs_lines, 2, tmp_path)
