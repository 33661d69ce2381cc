"""Writes files of weights as others do, for tests that load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from zerox.checkpoint.safetensors_file import make_header

FORMATS = ("safetensors", "one in a folder", "several", "torch", "several of torch")
STEMS = {"several": ("model", "safetensors"), "several of torch": ("pytorch_model", "bin")}


def write_safetensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """By hand: the package is not there in every environment."""
    header, entries = make_header([(name, t.dtype, t.shape) for name, t in tensors.items()], {"format": "pt"})
    with file.open("wb") as stream:
        stream.write(header)
        for name in entries:
            stream.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def write_weights(kind: str, source: Mapping[str, Tensor], folder: Path) -> Path:
    """Returns what load_weights() is given. ``source``: without names that share a weight with another."""
    folder.mkdir(parents=True)
    if kind == "safetensors":
        write_safetensors(source, folder / "any name")
        return folder / "any name"
    if kind == "torch":
        torch.save(dict(source), folder / "weights.pt")
        return folder / "weights.pt"
    if kind == "one in a folder":
        write_safetensors(source, folder / "model.safetensors")
        return folder
    stem, ending = STEMS[kind]
    names = list(source)
    weight_map = {}
    for number in range(3):
        file = f"{stem}-{number + 1:05}-of-00003.{ending}"
        own = {name: source[name] for name in names[number::3]}
        weight_map |= dict.fromkeys(own, file)
        write_safetensors(own, folder / file) if kind == "several" else torch.save(own, folder / file)
    write_index(folder / f"{stem}.{ending}.index.json", weight_map)
    return folder


def write_index(file: Path, weight_map: Mapping[str, str]) -> None:
    file.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}))
