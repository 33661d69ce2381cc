"""Masks in checkpoints of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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


def saved_by_dcp(rank: int, world: int, case: Case, folder: Path) -> dict[str, Any]:
    module = model()
    optimizer = optimizer_of(case, module)
    sparsity = case.sparsity(optimizer)
    steps(rank, world, module, optimizer, sparsity, range(5), torch.float32)
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optimizer": state, "sparsity": sparsity.state_dict()}, checkpoint_id=folder)
    masks = sparsity.masks()
    steps(rank, world, module, optimizer, sparsity, range(5, 9), torch.float32)
    return {"masks": masks, "later": params_of(module), "later masks": sparsity.masks()}


def loaded_by_dcp(rank: int, world: int, case: Case, folder: Path) -> dict[str, Any]:
    module = model()
    optimizer = optimizer_of(case, module, bucket_cap_mb=0.01)
    sparsity = case.sparsity(optimizer)
    weights, state = get_state_dict(module, optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": state, "sparsity": sparsity.state_dict()}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    sparsity.load_state_dict(found["sparsity"])
    masks = sparsity.masks()
    steps(rank, world, module, optimizer, sparsity, range(5, 9), torch.float32)
    return {"masks": masks, "later": params_of(module), "later masks": sparsity.masks()}


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 2), (2, 4)])
def test_torch_s_distributed_checkpoints_have_masks(saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    case = CASES["fp32"]
    before = run_ranks(saved_by_dcp, saved_on, case, tmp_path)[0]
    for after in run_ranks(loaded_by_dcp, loaded_on, case, tmp_path):
        for what in before:
            same(after[what], before[what])


def unfrozen_later(folder: Path) -> tuple[Any, Any]:
    """A checkpoint from before "2.weight" was masked, and what now has a mask for it."""
    module = model()
    module[2].weight.requires_grad_(False)
    optimizer = optimizer_of(Case(), module)
    Sparsity(optimizer, {"*.weight": 0.5})
    zerox.save(folder, module, optimizer)
    other = model()
    again = optimizer_of(Case(), other)
    Sparsity(again, {"*.weight": 0.5})
    return other, again


def test_a_mask_that_a_checkpoint_lacks_or_that_nobody_has_is_told(tmp_path: Path) -> None:
    module, optimizer = unfrozen_later(tmp_path / "frozen")
    with pytest.raises(CheckpointError, match=r"missing: optimizer\.2\.weight\.mask"):
        zerox.load(tmp_path / "frozen", module, optimizer)
    zerox.save(tmp_path / "more", module, optimizer)
    fewer = optimizer_of(Case(), less := model())
    sparsity = Sparsity(fewer, {"[04].weight": 0.5})
    sparsity.targets = {"*.weight": 0.5}  # as of a pattern that found less here
    with pytest.raises(CheckpointError, match=r"2\.weight\.mask was saved, and the zerox.Sparsity that there is has"):
        zerox.load(tmp_path / "more", less, fewer)


def test_a_pruned_model_s_checkpoint_says_so_and_loads(tmp_path: Path) -> None:
    module = model()
    module[0].weight.data[:, ::3] = 0
    optimizer = optimizer_of(Case(), module)
    sparsity = Sparsity.from_zeros(optimizer, ["0.weight"])
    zerox.save(tmp_path / "x", module, optimizer)
    other = optimizer_of(Case(), dense := model())
    with pytest.raises(CheckpointError, match=r"masks of zerox.Sparsity.from_zeros\(optimizer, \['0.weight'\]\)"):
        zerox.load(tmp_path / "x", dense, other)
    again = Sparsity.from_zeros(other, ["0.weight"])  # of which there are none yet
    zerox.load(tmp_path / "x", dense, other)
    same(again.masks(), sparsity.masks())
    assert again.sparsity()["0.weight"] > 0.3
    assert not dense[0].weight[:, ::3].any()


def in_channels_last(rank: int, world: int, folder: Path) -> list[bool]:
    """Masks, checkpoints and files of a convolution whose memory is in another order than its shape."""
    torch.manual_seed(0)
    module = torch.nn.Conv2d(12, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = module.weight.detach().clone()
    optimizer = zerox.FusedShardedAdam(module.named_parameters(), lr=1e-2)
    sparsity = Sparsity(optimizer, {"weight": 0.5})
    kept = before.abs() > before.abs().flatten().kthvalue(before.numel() // 2).values
    found = [torch.equal(sparsity.masks()["weight"], kept), torch.equal(module.weight, before * kept)]
    for step in range(2):
        images = torch.randn(2, 12, 6, 6, generator=torch.Generator().manual_seed(step))
        module(images.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found += [bool((module.weight[~kept] == 0).all()), bool((module.weight[kept] != before[kept]).all())]
    zerox.save(folder, module, optimizer)
    other = torch.nn.Conv2d(12, 16, 3)  # in the order of its shape
    again = zerox.FusedShardedAdam(other.named_parameters(), lr=1e-2)
    masks = Sparsity(again, {"weight": 0.5})
    zerox.load(folder, other, again)
    return [*found, torch.equal(masks.masks()["weight"], kept), torch.equal(other.weight, module.weight)]


def test_masks_know_channels_last(tmp_path: Path) -> None:
    for found in run_ranks(in_channels_last, 2, tmp_path / "x"):
        assert found == [True] * 6
    convert_file(tmp_path / "x", tmp_path / "w.pt", weights=True, fp32=False, keys=("model", "optimizer"), masks=True)
    weights = torch.load(tmp_path / "w.pt")
    assert torch.equal(weights["weight_mask"], weights["weight"] != 0)
