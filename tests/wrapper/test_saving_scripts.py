"""Scripts with two changed lines that rank 0 saves: each goes on as under torch's, on equal and unequal numbers of
ranks, and from the other's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.wrapper.saving_scripts import BEGUN, MORE, SCRIPTS, Training
from tests.wrapper.twins import ATOL, STAGES, Script, of_torch, of_zerox, values_of

OF_TORCH = 0  # in place of a stage
KINDS = (OF_TORCH, *STAGES)


def script_of(rank: int, stage: int) -> Script:
    return of_torch(rank) if stage == OF_TORCH else of_zerox(rank, stage)


def saves(rank: int, _: int, name: str, folder: str) -> None:
    for stage in KINDS:
        training = SCRIPTS[name](script_of(rank, stage))
        training.run(0, BEGUN)
        training.save(Path(folder, str(stage)))


def found_of(training: Training) -> list[Tensor]:
    models = [training.model.module, *(each for each in training.kept.values() if isinstance(each, torch.nn.Module))]
    return [value.double() for model in models for value in values_of(model)]


def goes_on(rank: int, _: int, name: str, folder: str) -> dict[tuple[int, int], list[Tensor]]:
    """By whose file it is, and who goes on."""
    found = {}
    for saved in KINDS:
        for stage in KINDS if saved == OF_TORCH else (OF_TORCH, saved):
            training = SCRIPTS[name](script_of(rank, stage))
            training.load(Path(folder, str(saved)))
            training.run(BEGUN, MORE)
            found[saved, stage] = found_of(training)
    return found


def forgets(rank: int, _: int, name: str, folder: str) -> list[Tensor]:
    """The optimizer's state."""
    training = SCRIPTS[name](script_of(rank, 2))
    training.optimizer.load_state_dict = lambda _: None
    training.load(Path(folder, str(OF_TORCH)))
    training.run(BEGUN, MORE)
    return found_of(training)


def farthest(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_rank_0_saves_goes_on_as_under_torch(name: str, tmp_path: Path) -> None:
    for stage in KINDS:
        (tmp_path / str(stage)).mkdir()
    run_ranks(saves, 2, name, str(tmp_path))
    forgotten = run_ranks(forgets, 2, name, str(tmp_path))[0]
    for num_ranks in (2, 3, 1):
        for found in run_ranks(goes_on, num_ranks, name, str(tmp_path)):
            expected = found.pop((OF_TORCH, OF_TORCH))
            if num_ranks == 2:
                assert farthest(forgotten, expected) > 100 * ATOL, "nothing would show"
            for (saved, stage), values in found.items():
                assert farthest(values, expected) <= ATOL, f"saved in {saved}, gone on in {stage}, on {num_ranks} ranks"


def test_all_ranks_that_save_write_the_same_bytes(tmp_path: Path) -> None:
    for stage in KINDS:
        (tmp_path / str(stage)).mkdir()
    run_ranks(saves, 2, "Imagenet", str(tmp_path))
    for stage in KINDS:
        one, other = ((tmp_path / str(stage) / f"rank{rank}.pth.tar").read_bytes() for rank in range(2))
        assert one.replace(b"rank0", b"rank1") == other
