"""save() and load() of something else than a checkpoint, a model and an optimizer of zerox: one line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, ShardedOptimizer, load, remove, save


class Prepared(torch.optim.Optimizer):
    """Around another, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


MODEL = nn.Linear(3, 2)


def ours() -> FusedShardedAdam:
    return FusedShardedAdam(MODEL.named_parameters())


def theirs() -> torch.optim.AdamW:
    return torch.optim.AdamW(MODEL.parameters())


# What is passed behind the path, and what is said.
GIVEN: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "torch's": (lambda: (MODEL, theirs()), r"AdamW, which is no optimizer of zerox: build a FusedShardedAdam"),
    "prepared": (
        lambda: (MODEL, Prepared(ours())),
        r"test_arguments.Prepared, .*pass the FusedShardedAdam that it wraps, its .optimizer$",
    ),
    "torch's, prepared": (lambda: (MODEL, Prepared(theirs())), "no optimizer of zerox: build a FusedShardedAdam"),
    "a guest, prepared": (
        lambda: (MODEL, Prepared(ShardedOptimizer(MODEL.parameters(), torch.optim.SGD, lr=0.1))),
        "pass the ShardedOptimizer that it wraps",
    ),
    "swapped": (lambda: (ours(), MODEL), r"got \(path, optimizer, model\): swap the last two$"),
    "None": (lambda: (MODEL, None), "optimizer is None, which is no optimizer of zerox: pass the FusedShardedAdam"),
    "a list": (lambda: (MODEL, [ours()]), "optimizer is of the class builtins.list, which is no optimizer of zerox"),
    "no model": (
        lambda: (MODEL.state_dict(), ours()),
        r"model is of the class .*OrderedDict: pass the torch.nn.Module",
    ),
}


@pytest.mark.parametrize("call", [save, load])
@pytest.mark.parametrize("given", GIVEN)
def test_another_optimizer_or_model_is_one_line_with_the_way_out(call: Any, given: str, tmp_path: Path) -> None:
    make, says = GIVEN[given]
    with pytest.raises(TypeError, match=rf"^zerox.{call.__name__}\(\) takes \(path, model, optimizer\), and .*{says}"):
        call(tmp_path / "x", *make())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, MODEL], ids=["None", "3", "a model"])
@pytest.mark.parametrize("call", [save, load])
def test_another_path_is_one_line(call: Any, path: Any) -> None:
    with pytest.raises(TypeError, match=r"and path is .*: pass the checkpoint's folder as a string or a Path"):
        call(path, MODEL, ours())


def refused_on_all(rank: int, world_size: int, path: str) -> str:
    optimizer = ours()
    with pytest.raises(CheckpointError) as error:
        load(path, MODEL, optimizer)
    return str(error.value)


FILES = {
    "x.pt": "x.pt is no checkpoint: it is a file, and a checkpoint is a folder that zerox.save() wrote. torch.load()",
    "x.safetensors": "x.safetensors is no checkpoint: it is a file of safetensors, which has weights alone",
    "gone.pt": "gone.pt is no checkpoint: nothing is there. zerox.latest() finds the last checkpoint in a folder",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_or_nothing_is_no_checkpoint_and_the_way_out_is_told(name: str, tmp_path: Path) -> None:
    torch.save({"model": MODEL.state_dict(), "optimizer": theirs().state_dict()}, tmp_path / "x.pt")
    save_file(MODEL.state_dict(), tmp_path / "x.safetensors")
    first, second = run_ranks(refused_on_all, 2, str(tmp_path / name))
    assert FILES[name] in first
    assert "\n" not in first
    assert first == second
    with pytest.raises(CheckpointError, match="is no checkpoint: "):
        remove(tmp_path / name)
