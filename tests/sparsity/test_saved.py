"""Masks in checkpoints of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerox
from tests.ranks import run_ranks
from tests.sparsity.trained import Case, batch, model, optimizer_of, params_of, state_of
from zerox import CheckpointError, Sparsity
from zerox.checkpoint import manifest
from zerox.checkpoint.convert import convert_file

CUBIC = ("cubic", 0, 8, 2)
CASES = {
    "fp32": Case(schedule=CUBIC),
    "8 bits": Case(schedule=CUBIC, options={"state_dtype": "8bit"}),
    "bf16 and remainders": Case(dtype=torch.bfloat16, schedule=CUBIC),
    "2:4": Case(targets={"0.weight": 0.5}, pattern=(2, 4)),
}


def steps(rank: int, world: int, module: Any, optimizer: Any, sparsity: Any, numbers: range, dtype: Any) -> None:
    for step in numbers:
        module(batch(0, 1, step, dtype)).square().mean().backward()  # the same on all ranks: so the mean is, at any W
        optimizer.step()
        sparsity.step()
        optimizer.zero_grad()


def saved(rank: int, world: int, case: Case, stage: int, folder: Path) -> dict[str, Any]:
    module = model(case.dtype)
    optimizer = optimizer_of(case, module, stage=stage, bucket_cap_mb=0.01)
    sparsity = case.sparsity(optimizer)
    steps(rank, world, module, optimizer, sparsity, range(5), case.dtype)
    zerox.save(folder, module, optimizer)
    whole = state_of(optimizer, module)
    masks = sparsity.masks()
    steps(rank, world, module, optimizer, sparsity, range(5, 9), case.dtype)
    with optimizer.whole():
        return {"masks": masks, "state": whole, "later": params_of(module), "later masks": sparsity.masks()}


def loaded(rank: int, world: int, case: Case, stage: int, folder: Path) -> dict[str, Any]:
    module = model(case.dtype)
    optimizer = optimizer_of(case, module, stage=stage)
    sparsity = case.sparsity(optimizer)
    zerox.load(folder, module, optimizer)
    masks = sparsity.masks()
    steps(rank, world, module, optimizer, sparsity, range(5, 9), case.dtype)
    with optimizer.whole():
        return {"masks": masks, "later": params_of(module), "later masks": sparsity.masks()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_goes_on_bit_for_bit_at_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    before = run_ranks(saved, 2, case, 2, tmp_path / "saved")[0]
    for key, kept in before["masks"].items():
        assert torch.equal(before["state"][key]["mask"], kept)
    for world, stage in ((1, 2), (2, 1), (4, 3)):
        after = run_ranks(loaded, world, case, stage, tmp_path / "saved")[0]
        same(after["masks"], before["masks"])
        same(after["later"], before["later"])
        same(after["later masks"], before["later masks"])


def through_state_dicts(rank: int, world: int, case: Case) -> list[bool]:
    module = model()
    optimizer = optimizer_of(case, module)
    sparsity = case.sparsity(optimizer)
    steps(rank, world, module, optimizer, sparsity, range(5), torch.float32)
    own, whole = optimizer.state_dict(), [optimizer.full_state_dict()]
    torch.distributed.broadcast_object_list(whole)
    found = []
    for state in (own, whole[0]):
        other = model()
        other.load_state_dict(module.state_dict())
        again = optimizer_of(case, other)
        with pytest.raises(ValueError, match=r"has a mask: build a zerox.Sparsity for it before loading"):
            again.load_state_dict(state)
        masks = case.sparsity(again)
        again.load_state_dict(state)
        masks.load_state_dict(sparsity.state_dict())
        kept, expected = masks.masks(), sparsity.masks()
        found.append(all(torch.equal(kept[name], expected[name]) for name in expected))
    dense = optimizer_of(case, model())
    steps(rank, world, module, dense, masks, range(0), torch.float32)
    with pytest.raises(ValueError, match=r"has no mask, and the optimizer has a zerox.Sparsity for it: load first"):
        optimizer.load_state_dict(
            {**own, "state": {key: {k: v for k, v in of.items() if k != "mask"} for key, of in own["state"].items()}}
        )
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_have_masks_and_nobody_loses_them_silently(world: int) -> None:
    for found in run_ranks(through_state_dicts, world, CASES["fp32"]):
        assert found == [True, True]


def test_a_checkpoint_says_what_masks_it_has(tmp_path: Path) -> None:
    case = Case(targets={"0.weight": 0.5})
    module = model()
    optimizer = optimizer_of(case, module)
    zerox.save(tmp_path / "dense", module, optimizer)
    case.sparsity(optimizer)
    zerox.save(tmp_path / "masked", module, optimizer)
    assert manifest.read(tmp_path / "masked")["format"] == 2
    with pytest.raises(CheckpointError, match="has no masks: load it first"):
        zerox.load(tmp_path / "dense", module, optimizer)
    other = optimizer_of(case, other_module := model())
    with pytest.raises(CheckpointError, match=r"masks of zerox.Sparsity\(optimizer, \{'0.weight': 0.5\}\): build one"):
        zerox.load(tmp_path / "masked", other_module, other)
    convert_file(tmp_path / "masked", tmp_path / "masked.pt", weights=False, fp32=False, keys=("model", "optimizer"))
    masks = [state.get("mask") for state in torch.load(tmp_path / "masked.pt")["optimizer"]["state"].values()]
    assert [mask is not None for mask in masks] == [True, *[False] * 7]
    assert torch.equal(masks[0], module[0].weight != 0)
    Sparsity(other, {"2.weight": 0.5})
    with pytest.raises(CheckpointError, match=r"saved with targets=\{'0.weight': 0.5\}, and here it is \{'2.weight'"):
        zerox.load(tmp_path / "masked", other_module, other)
