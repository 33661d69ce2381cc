"""A rank that dies in load_weights(): the others name it, and don't go on from half of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_damaged_weights import Net, built, everything, source, step
from tests.checkpoint.test_deaths import answers_of_others, die
from tests.checkpoint.weight_folders import write_weights
from tests.kernels.shards import same_bits
from zerox import CheckpointError, load_weights
from zerox.checkpoint import loaded_weights, weights
from zerox.checkpoint.weight_reader import WeightReader

# What the victim is about to do, and whether anything was written then.
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "files": (weights, "find_weights", False),  # rank 0 alone
    "names": (weights, "renamed", False),
    "plan": (WeightReader, "plan", False),
    "homes": (weights, "bring_home", True),
    "reads": (WeightReader, "run", True),
    "a piece": (WeightReader, "_read", True),
    "the exchange": (weights, "share_loaded", True),
    "the last one": (loaded_weights, "_share_loose", True),
}


def load(rank: int, _: int, path: str, stage: int, moment: str, victim: int) -> list[str]:
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    before = everything(model, optimizer)
    if rank == victim:
        setattr(*MOMENTS[moment][:2], die)
    said = []
    try:
        load_weights(optimizer, path)
    except CheckpointError as error:
        said.append(str(error))
    if stage < 3 and not MOMENTS[moment][2]:  # in stage 3 they can't be read any more
        assert all(map(same_bits, everything(model, optimizer), before))
    try:
        step(model, optimizer, rank, 1)
    except RuntimeError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_others_name_it_and_do_not_go_on(tmp_path: Path, stage: int, moment: str) -> None:
    path = write_weights("several", source(), tmp_path / "x")
    victim = 0 if moment == "files" else 1
    for said in answers_of_others(tmp_path, load, victim, str(path), stage, moment, victim):
        assert len(said) == 2, said
        what = "could not be read to its end" if MOMENTS[moment][2] else "could not be loaded"
        assert said[0].startswith(f"zerox: {path} {what}"), said
        assert f"rank {victim}" in said[0], said
        assert "\n" not in said[0]


def test_the_model_of_these_tests_has_a_loose_part() -> None:
    """Or the last moment would be none."""
    assert list(Net(0).buffers())
