"""Masks outside of zerox: weights that torch's sparse kernels take, and files of torch and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import zerox
from tests.ranks import run_ranks
from tests.sparsity.trained import Case, batch, model, optimizer_of
from zerox import CheckpointError, Sparsity
from zerox.__main__ import main
from zerox.checkpoint.convert import convert_file


def export(rank: int, world: int, dtype: torch.dtype, pattern: tuple[int, int] | None, folder: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(128, 64).to(dtype)
    optimizer = zerox.FusedShardedAdam(module.named_parameters(), lr=1e-2)
    if pattern is not None:
        zerox.Sparsity(optimizer, {"weight": 0.5}, pattern=pattern)
    for _ in range(3):
        module(torch.randn(4, 128).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zerox.save(folder, module, optimizer)


def through_sparse_kernels_form(dtype: torch.dtype, pattern: tuple[int, int] | None, folder: Path) -> bool:
    """Whether trained and exported weights come back from the form that torch.sparse.to_sparse_semi_structured makes.

    That function itself wants a GPU. Its conversion, which it shares with these two, drops what the form can't hold.
    """
    run_ranks(export, 2, dtype, pattern, folder / "saved")
    convert_file(folder / "saved", folder / "w.safetensors", weights=False, fp32=False, keys=("model", "optimizer"))
    weight = load_file(folder / "w.safetensors")["weight"]
    assert weight.dtype is dtype
    assert weight.any()
    sparse, meta = sparse_semi_structured_from_dense_cutlass(weight)
    assert sparse.shape == (64, 64)
    back = sparse_semi_structured_to_dense_cutlass(sparse, meta)
    if dtype is torch.float32:  # torch moves the halves of a float as float16, and changes those that look like NaN
        return torch.allclose(back, weight, rtol=2**-6, atol=0.0)
    return torch.equal(back, weight)


@pytest.mark.parametrize(
    ("dtype", "pattern"), [(torch.bfloat16, (2, 4)), (torch.float16, (2, 4)), (torch.float32, (1, 2))]
)
def test_exported_weights_are_what_sparse_kernels_take(
    dtype: torch.dtype, pattern: tuple[int, int], tmp_path: Path
) -> None:
    assert through_sparse_kernels_form(dtype, pattern, tmp_path)


@pytest.mark.parametrize(("dtype", "pattern"), [(torch.bfloat16, None), (torch.float32, (2, 4))])
def test_sparse_kernels_form_does_not_hold_others(
    dtype: torch.dtype, pattern: tuple[int, int] | None, tmp_path: Path
) -> None:
    """Of 32 bits the form is one of two, so float32 weights of 2:4 must be cast first."""
    assert not through_sparse_kernels_form(dtype, pattern, tmp_path)


def trained(case: Case, steps: int) -> tuple[nn.Module, Any, Sparsity]:
    module = model()
    optimizer = optimizer_of(case, module)
    sparsity = case.sparsity(optimizer)
    train_on(module, optimizer, sparsity, range(steps))
    return module, optimizer, sparsity


def train_on(module: nn.Module, optimizer: Any, sparsity: Sparsity, steps: range) -> None:
    for step in steps:
        module(batch(0, 1, step, torch.float32)).square().mean().backward()
        optimizer.step()
        sparsity.step()
        optimizer.zero_grad()


CASE = Case(schedule=("cubic", 0, 8, 2))


def test_a_file_of_torch_with_masks_becomes_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    """One that convert made, and one that a user saved."""
    module, optimizer, sparsity = trained(CASE, 5)
    zerox.save(tmp_path / "x", module, optimizer, extra="of the user")
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "converted.pt")]) == 0
    state = {"model": module.state_dict(), "optimizer": optimizer.full_state_dict()}
    torch.save({**state, "sparsity": sparsity.state_dict(), "extra": "of the user"}, tmp_path / "own.pt")
    train_on(module, optimizer, sparsity, range(5, 9))
    for name in ("converted", "own"):
        assert main(["convert", str(tmp_path / f"{name}.pt"), str(tmp_path / name)]) == 0
        other, again, masks = trained(CASE, 0)
        assert zerox.load(tmp_path / name, other, again) == "of the user"
        train_on(other, again, masks, range(5, 9))
        for key, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), f"{name}: {key}"
        for key, kept in sparsity.masks().items():
            assert torch.equal(masks.masks()[key], kept), f"{name}: {key}"
    torch.save(state, tmp_path / "nameless.pt")
    with pytest.raises(CheckpointError, match=r"has masks, and not of which zerox.Sparsity: put the state_dict\(\)"):
        convert_file(tmp_path / "nameless.pt", tmp_path / "y", False, False, ("model", "optimizer"))


def test_weights_have_masks_beside_them_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, optimizer, sparsity = trained(CASE, 5)
    zerox.save(tmp_path / "x", module, optimizer)
    expected = sparsity.masks()
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "without.safetensors")]) == 0
    assert "its masks are left out, and --masks writes them beside the weights" in capsys.readouterr().out
    assert load_file(tmp_path / "without.safetensors").keys() == module.state_dict().keys()
    for name, weights in (("with.safetensors", []), ("with.pt", ["--weights"])):
        assert main(["convert", "--masks", *weights, str(tmp_path / "x"), str(tmp_path / name)]) == 0
        read = torch.load if name.endswith(".pt") else load_file
        found: dict[str, Tensor] = read(tmp_path / name)  # type: ignore[operator]
        assert found.keys() == {*module.state_dict(), *(f"{key}_mask" for key in expected)}
        for key, kept in expected.items():
            assert found[f"{key}_mask"].dtype is torch.bool
            assert torch.equal(found[f"{key}_mask"], kept)
            assert not found[key][~kept].any()


def test_masks_that_can_t_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, optimizer, sparsity = trained(CASE, 2)
    sparsity.remove()
    zerox.save(tmp_path / "dense", module, optimizer)
    torch.save({}, tmp_path / "file.pt")
    wrong = {
        ("dense", "a.safetensors"): "it has no masks to write with --masks",
        ("dense", "a.pt"): "--masks is for a file of weights: the optimizer's state has its masks without it",
        ("file.pt", "a"): "--weights, --fp32 and --masks are for a checkpoint's folder",
    }
    for (source, target), reason in wrong.items():
        assert main(["convert", "--masks", str(tmp_path / source), str(tmp_path / target)]) == 1
        assert reason in capsys.readouterr().err
        assert not (tmp_path / target).exists()
