"""Weights that files have in several tensors, as experts: load_weights(rename=) says where in the weight each lies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.checkpoint.weight_folders import write_safetensors
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, load_weights, save

EXPERTS, ROWS, WIDTH = 3, 160, 40  # parts that ranks cut, too


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.zeros(EXPERTS, 2 * ROWS, WIDTH))
        self.mixed = nn.Parameter(torch.zeros(WIDTH, 10).t())
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, ROWS))


def parts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"experts.{e}.{w}": (ROWS, WIDTH) for e in range(EXPERTS) for w in ("w1", "w3")}
    shapes |= {f"experts.{e}.w2": (WIDTH, ROWS) for e in range(EXPERTS)}
    shapes |= {"left": (10, 7), "right": (10, WIDTH - 7), "gate.weight": (EXPERTS, WIDTH)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def place(name: str) -> Any:
    if found := re.fullmatch(r"experts\.(\d)\.(w\d)", name):
        expert = int(found[1])
        if found[2] == "w2":
            return "down", expert - EXPERTS  # counted from the end, as weights are indexed
        return "up", (expert, slice(0, ROWS) if found[2] == "w1" else slice(ROWS, None))
    halves = {"left": slice(7), "right": slice(7, None)}
    return ("mixed", (slice(None), halves[name])) if name in halves else name


def expected() -> dict[str, Tensor]:
    have = parts()
    up = [torch.cat([have[f"experts.{e}.{w}"] for w in ("w1", "w3")]) for e in range(EXPERTS)]
    down = [have[f"experts.{e}.w2"] for e in range(EXPERTS)]
    mixed = torch.cat([have["left"], have["right"]], 1)
    return {"gate.weight": have["gate.weight"], "up": torch.stack(up), "mixed": mixed, "down": torch.stack(down)}


def built(stage: int = 3, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, FusedShardedAdam]:
    model = Experts().to(dtype)
    return model, FusedShardedAdam(model.named_parameters(), stage=stage, bucket_cap_mb=0.01)


def put_together(rank: int, world_size: int, path: Path, stage: int, dtype: torch.dtype) -> list[bool]:
    model, optimizer = built(stage, dtype)
    keys = load_weights(optimizer, path, rename=place)
    assert keys == ([], [])
    with optimizer.whole():
        return [same_bits(value.clone(), expected()[name].to(dtype)) for name, value in model.named_parameters()]


def as_safetensors(folder: Path) -> Path:
    write_safetensors(parts(), folder / "model.safetensors")
    return folder


def as_torch(folder: Path) -> Path:
    """Tensors that lie transposed in the file too."""
    torch.save({name: value.t().contiguous().t() for name, value in parts().items()}, folder / "x.pt")
    return folder / "x.pt"


class Holder(nn.Module):
    """Of the parts, as parameters with dots in their names."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in parts().items():
            *path, last = name.split(".")
            at: nn.Module = self
            for each in path:
                if not hasattr(at, each):
                    at.add_module(each, nn.Module())
                at = getattr(at, each)
            at.register_parameter(last, nn.Parameter(value))


def saved_by_ranks(rank: int, world_size: int, folder: Path) -> None:
    model = Holder()
    save(folder / "checkpoint", model, FusedShardedAdam(model.parameters(), stage=3, bucket_cap_mb=0.005))


def as_checkpoint(folder: Path) -> Path:
    run_ranks(saved_by_ranks, 3, folder)
    return folder / "checkpoint"


@pytest.mark.parametrize("write", [as_safetensors, as_torch, as_checkpoint])
@pytest.mark.parametrize(("stage", "dtype"), [(2, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_what_files_have_in_parts_is_put_together(
    tmp_path: Path, write: Callable[[Path], Path], stage: int, dtype: torch.dtype
) -> None:
    path = write(tmp_path)
    for found in run_ranks(put_together, 2, path, stage, dtype):
        assert all(found)


# ---- what is refused, with nothing changed


def change(**changed: Any) -> Callable[[str], Any]:
    return lambda name: changed.get(name.replace(".", "_"), place(name))


REFUSED: dict[str, tuple[Callable[[str], Any], str]] = {
    "one is missing": (change(left=None), r"'right' and 0 more tensors of the files do not make up mixed: of its 400 "),
    "one is there twice": (change(left=("mixed", (slice(None), slice(1, 8)))), r"they have 400, or some twice"),
    "another shape": (
        change(left=("mixed", (slice(None), slice(8)))),
        r"'left' has shape \[10, 7\], and goes to mixed\[:, :8\], which has \[10, 8\]",
    ),
    "no such place": (
        change(experts_0_w2=("down", 3)),
        r"down\[3\] is no part of down, which has shape \[3, ",
    ),
    "a step": (change(left=("mixed", (slice(None), slice(0, 14, 2)))), r"mixed\[:, 0:14:2\] is no part of mixed"),
    "too many": (change(left=("mixed", (0, 0, 0))), r"mixed\[0, 0, 0\]: mixed has 2 dimensions"),
    "no index": (change(left=("mixed", "all")), r"the second is where it lies in the first, a number, a slice or"),
    "whole and a part": (change(gate_weight="mixed"), r"rename makes one name of .*: 'mixed'"),
    "no weight": (change(left=("nobody", 0)), r"do not make up mixed"),
}


def refuses(rank: int, world_size: int, path: Path) -> dict[str, str]:
    model, optimizer = built()
    said = {}
    for name, (rename, _) in REFUSED.items():
        with pytest.raises(CheckpointError) as raised:
            load_weights(optimizer, path, rename=rename)
        said[name] = str(raised.value)
    with optimizer.whole():
        assert not any(value.any() for value in (model.up, model.mixed, model.down))  # type: ignore[union-attr]
    load_weights(optimizer, path, rename=place)
    return said


def test_what_does_not_make_up_a_weight_is_named_on_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(refuses, 2, as_safetensors(tmp_path)):
        for name, (_, expected) in REFUSED.items():
            assert re.search(expected, said[name]), (name, said[name])


def test_parts_of_what_the_model_does_not_have_are_unexpected(tmp_path: Path) -> None:
    write_safetensors({**parts(), "more": torch.ones(2)}, tmp_path / "model.safetensors")
    model, optimizer = built()
    rename = change(more=("nobody", (0, slice(2))))
    with pytest.raises(CheckpointError, match=r'Unexpected key\(s\) in state_dict: "nobody"'):
        load_weights(optimizer, tmp_path, rename=rename)
    assert load_weights(optimizer, tmp_path, rename=rename, strict=False) == ([], ["nobody"])
    assert same_bits(model.up.detach(), expected()["up"])  # type: ignore[union-attr]


def test_parts_may_make_up_a_weight_whose_name_a_tensor_of_the_files_has(tmp_path: Path) -> None:
    """Which is another weight's then."""
    tensors = {"down": torch.ones(EXPERTS, WIDTH), **parts()}
    del tensors["gate.weight"]
    write_safetensors(tensors, tmp_path / "model.safetensors")
    model, optimizer = built()
    load_weights(optimizer, tmp_path, rename=change(down="gate.weight"))
    assert same_bits(model.down.detach(), expected()["down"])  # type: ignore[union-attr]
    assert bool((model.gate.weight == 1).all())  # type: ignore[union-attr]


@pytest.mark.parametrize("strict", [True, False])
def test_eight_bits_with_scales_beside_them_are_no_values(tmp_path: Path, strict: bool) -> None:
    """As DeepSeek's files have them."""
    stored = {name: value.detach() for name, value in expected().items()}
    stored |= {"gate.weight": stored["gate.weight"].to(torch.float8_e4m3fn), "gate.weight_scale_inv": torch.ones(1, 1)}
    write_safetensors(stored, tmp_path / "model.safetensors")
    _, optimizer = built()
    with pytest.raises(
        CheckpointError, match=r"mismatch for gate\.weight: torch\.float8_e4m3fn in the checkpoint, with "
    ):
        load_weights(optimizer, tmp_path, strict=strict)


def test_parts_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = parts()
    write_safetensors({**tensors, "left": tensors["left"].half()}, tmp_path / "model.safetensors")
    _, optimizer = built()
    with pytest.raises(CheckpointError, match=r"parts of mixed are torch\.float16 and torch\.float32 in the files"):
        zerox.load_weights(optimizer, tmp_path, rename=place)
