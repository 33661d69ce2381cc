"""Trainer's checkpoints under zerox: they go on bit for bit, on other numbers of ranks too, and from and to AdamW's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from tests.frameworks.loops import MOST
from tests.frameworks.trainers import ALONE, ZeroxTrainer, train
from tests.hugging_face import run_anywhere

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
SCALE = 2.0**124  # the first step overflows, and none after it
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "stage 3": {"stage": 3},
    "bf16 with masters": {"dtype": torch.bfloat16},
    "8-bit moments": {"options": {"state_dtype": "8bit"}},
    "scaler": {"scaler": SCALE},
}


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return same(a, b) if isinstance(a, dict) else torch.equal(torch.as_tensor(a), torch.as_tensor(b))

    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_a_training_goes_on_bit_for_bit(world_size: int, kind: str, tmp_path: Path) -> None:
    first = run_anywhere(train, world_size, ZeroxTrainer, tmp_path, SAVES, KINDS[kind])
    how = KINDS[kind] | {"resume": str(tmp_path / "checkpoint-3")}
    second = run_anywhere(train, world_size, ZeroxTrainer, tmp_path / "again", SAVES, how)
    for one, other in zip(first, second, strict=True):
        assert same(one.weights, other.weights)
        assert one.norms[3:] == other.norms
        assert one.losses[3:] == other.losses
    assert len(second[0].losses) == 2
    assert any(state["exp_avg"].any() for state in second[0].state.values())


@pytest.mark.parametrize("kind", ["fp32", "stage 3", "bf16 with masters"])
def test_another_number_of_ranks_goes_on_from_it(kind: str, tmp_path: Path) -> None:
    run_anywhere(train, 2, ZeroxTrainer, tmp_path, SAVES, KINDS[kind])
    how = KINDS[kind] | {"resume": str(tmp_path / "checkpoint-3")}
    found = [run_anywhere(train, size, ZeroxTrainer, tmp_path / str(size), SAVES, how)[0] for size in (2, 1, ALONE)]
    assert len(found[0].state) > 10
    for each in found[1:]:
        assert same(each.state, found[0].state)
        assert len(each.losses) == 2


@pytest.mark.parametrize("kinds", [(ZeroxTrainer, Trainer), (Trainer, ZeroxTrainer)], ids=["to AdamW", "from AdamW"])
@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_adamw_goes_on_where_zerox_was_and_the_other_way_round(
    world_size: int, kinds: tuple[type[Trainer], type[Trainer]], tmp_path: Path
) -> None:
    first = run_anywhere(train, world_size, kinds[0], tmp_path, SAVES, {})
    how = {"resume": str(tmp_path / "checkpoint-3")}
    second = run_anywhere(train, world_size, kinds[1], tmp_path / "again", SAVES, how)
    for one, other in zip(first, second, strict=True):
        assert max(float((value - other.weights[name]).abs().max()) for name, value in one.weights.items()) <= MOST
        assert one.norms[3:] == pytest.approx(other.norms, rel=1e-6)


class UnscalingTrainer(Trainer):
    """Accelerate unscales before a clip on accelerators only."""

    def _clip_grad_norm(self, model: Any) -> Any:
        self.accelerator.scaler.unscale_(self.optimizer.optimizer)
        return super()._clip_grad_norm(model)


def skipping(rank: int, world_size: int, kind: type[Trainer], folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Not with a fused AdamW, whose skipped steps Accelerate does not see."""
    found = train(rank, world_size, kind, folder, {"optim": "adamw_torch"}, {"scaler": SCALE})
    return found.rates, found.weights


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_steps_that_a_scaler_skips_are_seen(world_size: int, tmp_path: Path) -> None:
    ours, theirs = (run_anywhere(skipping, world_size, kind, tmp_path) for kind in (ZeroxTrainer, UnscalingTrainer))
    for (rates, weights), (other_rates, others) in zip(ours, theirs, strict=True):
        assert rates == other_rates
        assert rates[0] == rates[1] > rates[2]
        assert max(float((value - others[name]).abs().max()) for name, value in weights.items()) <= MOST
