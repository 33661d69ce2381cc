"""A call that one rank alone makes is an error on all ranks that names it as the user did, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zerox
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

UNEVEN = "optimizer.join()"


def first(ours: FusedShardedAdam) -> Any:
    return ours.param_groups[0]["params"][0]


def state_for_dcp(ours: FusedShardedAdam, model: nn.Module, _: str) -> None:
    get_optimizer_state_dict(model, ours, options=StateDictOptions(full_state_dict=True))


ALONE: dict[str, Callable[[FusedShardedAdam, nn.Module, str], Any]] = {
    "zerox.save()": lambda ours, model, folder: zerox.save(f"{folder}/new", model, ours),
    "zerox.load()": lambda ours, model, folder: zerox.load(f"{folder}/saved", model, ours),
    "full_state_dict()": lambda ours, *_: ours.full_state_dict(),
    "consolidate_state_dict()": lambda ours, *_: ours.consolidate_state_dict(),
    "torch.distributed.checkpoint's getters of state with full_state_dict=True": state_for_dcp,
    "full_grad()": lambda ours, *_: ours.full_grad(first(ours)),
    "set_full_grad_()": lambda ours, *_: ours.set_full_grad_(first(ours), first(ours).detach()),
    "full_state()": lambda ours, *_: ours.full_state(first(ours)),
    "set_full_state_()": lambda ours, *_: ours.set_full_state_(first(ours), step=3),
    "add_param_group()": lambda ours, *_: ours.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
}


def step_or(rank: int, world_size: int, stage: int, call: Callable[..., Any] | str, folder: str) -> str:
    """Rank 0 makes the call after a step, and rank 1 goes on."""
    model = nn.Linear(4, 4)
    ours = FusedShardedAdam(model.named_parameters(), stage=stage)
    zerox.save(f"{folder}/saved", model, ours)
    act = ALONE[call] if isinstance(call, str) else call
    try:
        for number in range(3):
            model(torch.ones(2, 4)).sum().backward()
            ours.step()
            ours.zero_grad()
            if rank == 0 and number == 1:
                act(ours, model, folder)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ALONE)
def test_what_rank_0_alone_calls_is_named_on_all_ranks_with_the_way_out(name: str, stage: int, tmp_path: Any) -> None:
    for said in run_ranks(step_or, 2, stage, name, str(tmp_path)):
        assert f"rank 1 is in step() while rank 0 is in {name}: call {name} on all ranks, after the same step" in said
        assert UNEVEN not in said, "no number of batches is to blame"


def with_masks(rank: int, world_size: int) -> str:
    model = nn.Linear(4, 4)
    ours = FusedShardedAdam(model.named_parameters())
    sparsity = zerox.Sparsity(ours, {"weight": 0.5})
    model(torch.ones(2, 4)).sum().backward()
    try:
        sparsity.masks() if rank == 0 else ours.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_calls_of_a_sparsity_are_named_too() -> None:
    for said in run_ranks(with_masks, 2):
        assert "rank 1 is in step() while rank 0 is in Sparsity.masks(): call Sparsity.masks() on all ranks" in said


def waits_for_the_dead(rank: int, world_size: int, name: str) -> str:
    model = nn.Linear(4, 4)
    ours = FusedShardedAdam(model.named_parameters())
    model(torch.ones(2, 4)).sum().backward()
    ours.step()
    if rank == 1:
        fail_now(SIGKILL)
    try:
        if name == "step()":
            ours.step()
        else:
            ALONE[name](ours, model, "")
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "advice"),
    [("step()", f"put their loops inside {UNEVEN}"), ("full_state_dict()", "Do all ranks call full_state_dict()?")],
)
def test_join_is_advised_only_where_numbers_of_batches_can_be_why_a_rank_is_gone(
    name: str, advice: str, tmp_path: Path
) -> None:
    run = start_ranks(waits_for_the_dead, 2, name, folder=tmp_path / "run", timeout_s=60)
    try:
        said = run.answer(0, within_s=60)
        assert f"in {name} a rank did not answer: rank 1 is gone" in said
        assert advice in said
        assert (UNEVEN in said) == (UNEVEN in advice)
    finally:
        run.close()
