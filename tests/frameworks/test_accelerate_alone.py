"""What one process alone calls of an adopted accelerator: an error that names it, instead of a wait for the timeout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zerox
from tests.frameworks.loops import Case, make_accelerator
from tests.hugging_face import accelerators_environment
from tests.pull.shares import with_shares
from tests.ranks import TIMEOUT_S, run_ranks

SAVED = "accelerator.save_state()"
BARRIER = "accelerator.wait_for_everyone()"


def prepared(stage: int) -> tuple[Any, Any, Any]:
    accelerator = make_accelerator(Case(stage=stage), "zerox")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = zerox.FusedShardedAdam(model.parameters(), stage=stage)
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()


def save_alone(rank: int, world_size: int, stage: int, folder: str) -> str:
    """As 91 of diffusers' examples do."""
    whole: dict[str, Any] = {}
    with accelerators_environment(rank, world_size):
        accelerator, model, optimizer = prepared(stage)
        try:
            for number in range(3):
                step(accelerator, model, optimizer)
                if number == 1:
                    whole = optimizer.optimizer.full_state_dict()
                if accelerator.is_main_process and number == 1:
                    accelerator.save_state(folder)
        except RuntimeError as error:
            return str(error)
    if rank == 0:
        saved = torch.load(Path(folder, "optimizer.bin"), weights_only=True)
        for number, state in whole["state"].items():
            assert all(torch.equal(value, saved["state"][number][key]) for key, value in state.items())
    return "no error"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_of_the_main_process_alone_is_whole(stage: int, tmp_path: Path) -> None:
    assert run_ranks(save_alone, 2, stage, str(tmp_path)) == ["no error"] * 2


def save_share_alone(rank: int, world_size: int, stage: int, folder: str) -> str:
    return str(with_shares(save_alone)(rank, world_size, stage, folder))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_of_the_main_process_alone_is_named_and_how_to_do_it(stage: int, tmp_path: Path) -> None:
    for said in run_ranks(save_share_alone, 2, stage, str(tmp_path)):
        assert f"rank 1 is in step() while rank 0 is in {SAVED}: call {SAVED} on all ranks" in said
        assert "join" not in said


@with_shares
def save_before_a_barrier(rank: int, world_size: int, folder: str) -> tuple[float, str]:
    with accelerators_environment(rank, world_size):
        accelerator, model, optimizer = prepared(2)
        step(accelerator, model, optimizer)
        accelerator.wait_for_everyone()  # one that all come to leaves nothing behind
        step(accelerator, model, optimizer)
        start = time.monotonic()
        try:
            if accelerator.is_main_process:
                accelerator.save_state(folder)
        except RuntimeError as error:
            accelerator.wait_for_everyone()  # in a script the process ends, and torch ends the other's barrier
            return time.monotonic() - start, str(error)
        accelerator.wait_for_everyone()
        try:
            step(accelerator, model, optimizer)
        except RuntimeError as error:
            return time.monotonic() - start, str(error)
    return 0.0, "no error"


def test_a_save_of_the_main_process_alone_before_a_barrier_is_an_error_long_before_the_timeout(tmp_path: Path) -> None:
    for seconds, said in run_ranks(save_before_a_barrier, 2, str(tmp_path)):
        assert f"rank 1 is in {BARRIER}, and waits there for rank 0, which is in {SAVED}: call {SAVED}" in said
        assert seconds < TIMEOUT_S / 2


def come_late(rank: int, world_size: int, folder: str) -> bool:
    """Rank 0 is long in a call in which rank 1 joins late, after a barrier that both have been at."""
    with accelerators_environment(rank, world_size):
        accelerator, model, optimizer = prepared(2)
        step(accelerator, model, optimizer)
        accelerator.wait_for_everyone()
        if rank == 1:
            time.sleep(8.0)  # rank 0 asks meanwhile, twice
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    return Path(folder, "optimizer.bin").exists()


def test_who_comes_late_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(come_late, 2, str(tmp_path)) == [True, True]


def swap_before_a_gather(rank: int, world_size: int) -> bool:
    """As diffusers' train_text_to_image.py: the main process validates with an average of the weights, while the others
    are in the next batch, whose losses are gathered."""
    with accelerators_environment(rank, world_size):
        accelerator, model, optimizer = prepared(3)
        for call in ("gather", "reduce"):
            step(accelerator, model, optimizer)
            if accelerator.is_main_process:
                before = [param.detach().clone() for param in model.parameters()]
                for param in model.parameters():
                    param.data.copy_(torch.ones_like(param))
                assert all(bool((param == 1).all()) for param in model.parameters())
                for param, value in zip(model.parameters(), before, strict=True):
                    param.data.copy_(value)
            getattr(accelerator, call)(torch.ones(1))
            step(accelerator, model, optimizer)
        optimizer.optimizer.synchronize()
    return True


def test_an_average_goes_in_where_the_others_gather() -> None:
    start = time.monotonic()
    assert run_ranks(swap_before_a_gather, 2) == [True, True]
    assert time.monotonic() - start < TIMEOUT_S / 2
