"""A rank that dies while it saves or loads: the others say so in zerox's words, with the path."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.in_the_way import put, small
from tests.mortal_ranks import fail_now, start_ranks
from zerox import CheckpointError, load, save
from zerox.checkpoint import place, store, writer

TIMEOUT_S = 20.0
# What the victim is about to do.
MOMENTS: dict[str, tuple[Any, str]] = {
    "names": (store, "parameter_names"),
    "data": (writer.CheckpointWriter, "write_data"),
    "metadata": (writer.CheckpointWriter, "finish"),  # rank 0 alone
    "host": (store, "save_object"),  # rank 0 alone
    "put": (place.Target, "put"),  # rank 0 alone
    "checks": (store.manifest, "check"),
    "tensors": (store.CheckpointReader, "read_data"),
}


def die(*_: Any, **__: Any) -> None:
    fail_now(signal.SIGKILL)


def answers_of_others(folder: Path, function: Callable[..., Any], victim: int, *arguments: Any) -> list[Any]:
    """Of three ranks those that lived."""
    ranks = start_ranks(function, 3, *arguments, folder=folder / "ranks", timeout_s=TIMEOUT_S)
    try:
        return [ranks.answer(rank, within_s=3 * TIMEOUT_S) for rank in range(3) if rank != victim]
    finally:
        ranks.close()


def save_or_load(rank: int, _: int, what: str, path: str, moment: str, victim: int) -> tuple[str, str]:
    model, optimizer = small()
    if rank == victim:
        if moment == "before":
            die()
        setattr(*MOMENTS[moment], die)
    try:
        save(path, model, optimizer) if what == "save" else load(path, model, optimizer)
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("what", "moment", "victim"),
    [
        ("save", "before", 1),
        ("save", "names", 1),
        ("save", "data", 1),
        ("save", "data", 0),
        ("save", "metadata", 0),
        ("save", "host", 0),
        ("save", "put", 0),
        ("load", "before", 1),
        ("load", "checks", 0),
        ("load", "tensors", 1),
    ],
)
def test_the_others_raise_checkpoint_error_with_the_path(tmp_path: Path, what: str, moment: str, victim: int) -> None:
    path = put(tmp_path / "x", extra="old")
    arguments = (what, str(path), moment, victim)
    for kind, said in answers_of_others(tmp_path, save_or_load, victim, *arguments):
        assert kind == CheckpointError.__name__, said
        assert said.startswith(f"zerox: {path} could not be {'saved' if what == 'save' else ''}"), said
        assert "did not answer" in said
        assert "\n" not in said or moment == "before", "gloo's traces"  # synchronize() lists what has not arrived
    assert load(path, *small()) == "old"
