"""Accelerate's save_state() and load_state() with an adopted accelerator: all ranks' state, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file
from torch import Tensor

from tests.frameworks.loops import MOST, OPTIONS, SCALE, Case, Normed, make_accelerator, make_loader, make_optimizer
from tests.hugging_face import ALONE, accelerators_environment, run_anywhere
from tests.pull.shares import with_shares
from zerox import FusedShardedAdam

HALF = 4
KINDS: dict[str, tuple[torch.dtype, Case]] = {
    "stage 2": (torch.float32, Case(clip=0.05)),
    "stage 3": (torch.float32, Case(stage=3, of_zerox={"bucket_cap_mb": 0.02})),
    "bf16 with masters": (torch.bfloat16, Case()),
    "8-bit moments": (torch.float32, Case(of_zerox={"state_dtype": "8bit"})),
    "scaler": (torch.float32, Case(overflow=2)),
    "amsgrad": (torch.float32, Case(stage=1, of_zerox={"amsgrad": True})),
}


class Training:
    """A model with dropout, a scheduler and a shuffled loader, all prepared."""

    def __init__(self, world_size: int, case: Case, dtype: torch.dtype, kind: str = "zerox") -> None:
        self.accelerator: Accelerator = make_accelerator(case, kind)
        torch.manual_seed(0)
        self.plain = torch.nn.Sequential(torch.nn.Dropout(0.1), Normed()).to(dtype)
        optimizer = make_optimizer(case, kind, self.plain)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = make_loader(world_size, 2 * HALF)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.plain, optimizer, loader, schedule
        )
        self.dtype = dtype

    def steps(self, first: int, last: int) -> None:
        for number, (x,) in enumerate(self.loader):
            if first <= number < last:
                self.accelerator.backward(self.model(x.to(self.dtype)).float().square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def end(self) -> dict[str, Any]:
        # A copy of the state: on several ranks each has its share.
        shares = self.optimizer.optimizer.state_dict()["state"]
        parts = {
            f"{number} {key}": getattr(each, "own", each)
            for number, state in shares.items()
            for key, each in state.items()
        }
        scaler = self.accelerator.scaler
        return {
            "model": {name: value.clone() for name, value in self.plain.state_dict().items()},
            "state": {key: each.clone() for key, each in parts.items()},
            "rate": self.optimizer.param_groups[0]["lr"],
            "scale": None if scaler is None else scaler.get_scale(),
            "random": torch.get_rng_state(),
        }


def save_and_go_on(rank: int, world_size: int, kind: str, folder: Path) -> tuple[Any, Any]:
    dtype, case = KINDS[kind]
    with accelerators_environment(rank, world_size):
        training = Training(world_size, case, dtype)
        torch.manual_seed(10 + rank)
        training.steps(0, HALF)
        training.accelerator.save_state(str(folder))
        training.accelerator.save_model(training.model, str(folder / "weights"))
        at_save = training.end()
        training.steps(HALF, 2 * HALF)
        return at_save, training.end()


def load_and_go_on(rank: int, world_size: int, kind: str, folder: Path) -> tuple[Any, Any]:
    dtype, case = KINDS[kind]
    with accelerators_environment(rank, world_size):
        training = Training(world_size, case, dtype)
        training.steps(0, 1)
        if training.accelerator.scaler is not None:
            training.accelerator.scaler.update(2 * SCALE)
        training.accelerator.load_state(str(folder))
        at_load = training.end()
        training.steps(HALF, 2 * HALF)
        return at_load, training.end()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_a_training_goes_on_bit_for_bit(world_size: int, kind: str, tmp_path: Path) -> None:
    saved = run_anywhere(save_and_go_on, world_size, kind, tmp_path)
    loaded = run_anywhere(load_and_go_on, world_size, kind, tmp_path)
    for (at_save, end), (at_load, other_end) in zip(saved, loaded, strict=True):
        assert not same(at_save["model"], end["model"])
        for key in at_save:
            assert same(at_load[key], at_save[key]), key
            assert same(other_end[key], end[key]), key
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert {name: value for name, value in saved[0][0]["model"].items() if name in weights}.keys() == weights.keys()
    assert all(torch.equal(value, saved[0][0]["model"][name]) for name, value in weights.items())
    assert len(saved[0][0]["model"]) - len(weights) == 1, "tied weights are saved once"


def whole_after_load(rank: int, world_size: int, kind: str, folder: Path) -> dict[str, Any]:
    dtype, case = KINDS[kind]
    with accelerators_environment(rank, world_size):
        training = Training(world_size, case, dtype)
        training.accelerator.load_state(str(folder))
        return training.optimizer.optimizer.full_state_dict()


@pytest.mark.parametrize("kind", ["stage 2", "stage 3", "bf16 with masters", "8-bit moments"])
def test_another_number_of_ranks_loads_it(kind: str, tmp_path: Path) -> None:
    run_anywhere(save_and_go_on, 2, kind, tmp_path)
    by_two = run_anywhere(whole_after_load, 2, kind, tmp_path)[0]
    by_one = run_anywhere(whole_after_load, 1, kind, tmp_path)[0]
    assert same(by_two["state"], by_one["state"])
    assert len(by_two["state"]) > 5


def go_over(rank: int, world_size: int, kinds: tuple[str, str], folder: Path) -> tuple[Any, Any]:
    """How the first kind goes on, and how the second one does from its files."""
    ends = []
    for kind in kinds:
        with accelerators_environment(rank, world_size):
            training = Training(world_size, Case(), torch.float32, kind)
            if kind == kinds[0]:
                training.steps(0, HALF)
                training.accelerator.save_state(str(folder))
                training.accelerator.wait_for_everyone()
            training.accelerator.load_state(str(folder))
            training.steps(HALF, 2 * HALF)
            ends.append((training.plain.state_dict(), training.optimizer.param_groups[0]["lr"]))
    return ends[0], ends[1]


@pytest.mark.parametrize("kinds", [("zerox", "torch"), ("torch", "zerox")], ids=" to ".join)
@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_adamw_goes_on_where_zerox_was_and_the_other_way_round(
    world_size: int, kinds: tuple[str, str], tmp_path: Path
) -> None:
    (one, one_rate), (other, other_rate) = run_anywhere(go_over, world_size, kinds, tmp_path)[0]
    assert one_rate == other_rate < OPTIONS["lr"]
    assert one.keys() == other.keys()
    far = {name: float((value.double() - other[name].double()).abs().max()) for name, value in one.items()}
    assert max(far.values()) <= MOST, far


def on_two_nodes(rank: int, world_size: int, folder: Path) -> list[int]:
    """As if each rank were on a machine of its own, with a disk of its own."""
    with accelerators_environment(rank, world_size):
        training = Training(world_size, Case(), torch.float32)
        training.accelerator.project_configuration.save_on_each_node = True
        PartialState._shared_state["local_process_index"] = 0
        training.steps(0, 1)
        training.accelerator.save_state(str(folder / str(rank)))
        dist.barrier()
        saved = torch.load(folder / str(rank) / "optimizer.bin", weights_only=True)
        return [state["exp_avg"].numel() for state in saved["state"].values() if "exp_avg" in state]


def test_each_machine_s_file_is_whole(tmp_path: Path) -> None:
    one, other = run_anywhere(on_two_nodes, 2, tmp_path)
    assert one == other
    assert sum(one) == sum(param.numel() for param in Normed().parameters())


@with_shares
def share_is_refused(rank: int, world_size: int) -> None:
    with accelerators_environment(rank, world_size):
        training = Training(world_size, Case(), torch.float32)
        training.steps(0, 1)
        with pytest.raises(RuntimeError, match=r"one rank's share .*accelerator\.save_state\(\) or zerox\.save\(\)"):
            training.optimizer.state_dict()
        training.optimizer.consolidate_state_dict()
        found = training.optimizer.state_dict()
        if rank == 0:
            torch.optim.AdamW(Normed().parameters()).load_state_dict(found)
        with pytest.raises(RuntimeError, match="one rank's share"):
            training.optimizer.state_dict()
        assert isinstance(training.optimizer.optimizer, FusedShardedAdam)


def test_a_share_is_not_taken_for_the_state() -> None:
    run_anywhere(share_is_refused, 2)


def saved_by_hand(rank: int, world_size: int, path: Path) -> None:
    """As by a Trainer that nobody adopted."""
    with accelerators_environment(rank, world_size):
        training = Training(world_size, Case(), torch.float32)
        training.steps(0, 1)
        whole = training.optimizer.optimizer.full_state_dict()
        if rank == 0:
            torch.save(training.optimizer.state_dict(), path)
            saved = torch.load(path, weights_only=True)
            assert same(saved["state"], whole["state"])
            torch.optim.AdamW(Normed().parameters()).load_state_dict(saved)
        dist.barrier()


def test_what_one_rank_saves_by_hand_is_whole(tmp_path: Path) -> None:
    run_anywhere(saved_by_hand, 2, tmp_path / "optimizer.pt")
