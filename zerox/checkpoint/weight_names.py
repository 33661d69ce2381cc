"""Which tensor of a file becomes which weight of the model, and what there is to say in torch's words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerox.checkpoint.manifest import CheckpointError, some
from zerox.checkpoint.names import EXTRA_STATE
from zerox.checkpoint.weight_files import Stored, WeightFiles
from zerox.checkpoint.weight_parts import Weight
from zerox.checkpoint.weight_places import Index, Placed
from zerox.ranks.calls import warn_caller

New = str | tuple[str, Index] | None
Rename = Callable[[str], New] | Mapping[str, New]
SCALES = "_scale_inv", "_scale", "_scales"  # behind the name of what is stored in 8 bits
COUNT = "num_batches_tracked"  # torch's old files lack it, and its load_state_dict() never misses it


class LoadedKeys(NamedTuple):
    """As torch's load_state_dict() returns: names of the model that the files lack, and what else the files have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def renamed(files: WeightFiles, rename: Rename | None) -> tuple[dict[str, str], dict[str, list[Placed]]]:
    """By name in the model, the name in the files; and the parts of what is made of several.

    CheckpointError if two of these become one.
    """
    found: dict[str, str] = {}
    parts: dict[str, list[Placed]] = {}
    known = [*files.tensors, *files.others]
    if isinstance(rename, Mapping) and (unknown := [name for name in rename if name not in known]):
        raise CheckpointError(f"rename has '{unknown[0]}', and the files have no tensor of that name")
    for name in known:
        new: object = name
        if isinstance(rename, Mapping):
            new = rename.get(name, name)
        elif rename is not None:
            new = rename(name)
        if new is None:
            continue
        placed = None
        if isinstance(new, tuple) and len(new) == 2 and name in files.tensors:
            placed = _placed(name, new)
            new = new[0]
        if not isinstance(new, str):
            raise CheckpointError(f"rename makes {new!r} of '{name}', which is no name and not None")
        if placed is not None and (new not in found or new in parts):
            parts.setdefault(new, []).append(placed)
            found[new] = new
            continue
        if new in found:
            other = parts[new][0].name if new in parts else found[new]
            raise CheckpointError(f"rename makes one name of '{other}' and '{name}': '{new}'")
        found[new] = name
    return found, parts


def _placed(name: str, new: tuple[Any, ...]) -> Placed:
    index = new[1] if isinstance(new[1], tuple) else (new[1],)
    if all(isinstance(at, (int, slice)) for at in index):
        return Placed(name, index)
    raise CheckpointError(
        f"rename makes {new!r} of '{name}': the second is where it lies in the first, a number, a slice or a tuple of "
        "these, as (3, slice(0, 128))"
    )


def matched(weights: Sequence[Weight], stored: Mapping[str, Stored]) -> dict[int, str]:
    """By place among ``weights``, which of its names is there. Of several the last counts, as in torch's
    load_state_dict(). ``stored``: by name in the model."""
    found = {}
    for place, weight in enumerate(weights):
        there = [name for name in weight.names if name in stored]
        if there:
            found[place] = there[-1]
    return found


def missing(weights: Sequence[Weight], found: Collection[int]) -> list[str]:
    """A weight of several names needs one of them."""
    lost = [weight for place, weight in enumerate(weights) if place not in found]
    return [name for weight in lost if not _is_count(weight) for name in weight.names]


def _is_count(weight: Weight) -> bool:
    return weight.shape == () and weight.names[0].rpartition(".")[2] == COUNT


def is_extra_state(name: str) -> bool:
    """Whether torch has in it what a module's get_extra_state() returned, which may be no tensor."""
    return name.rpartition(".")[2] == EXTRA_STATE


def say_extra_state(names: Collection[str]) -> None:
    if found := [name for name in names if is_extra_state(name)]:
        warn_caller(
            f"zerox: load_weights() has not loaded {some(found)}, which is no weight: give it to "
            "set_extra_state() of its module yourself, on each rank"
        )


def misfits(weights: Sequence[Weight], stored: Mapping[str, Stored], scales: Mapping[str, str]) -> list[str]:
    """Lines for tensors of another shape, for complex ones that would have to become real or the reverse, and for 8-bit
    ones with ``scales`` in the files, by which they would have to be multiplied."""
    found = []
    for weight in weights:
        for name in weight.names:
            if name in stored and (line := _misfit(name, weight, stored[name], scales.get(name))):
                found.append(line)
    return found


def scales_of(names: Mapping[str, str], parts: Mapping[str, Sequence[Placed]], files: WeightFiles) -> dict[str, str]:
    """By name in the model, what the files have of scales for its tensor, as of float8 weights."""
    found = {}
    for new, name in names.items():
        sources = [each.name for each in parts[new]] if new in parts else [name]
        there = [f"{each}{end}" for each in sources for end in SCALES if f"{each}{end}" in files.tensors]
        if there:
            found[new] = there[0]
    return found


def _misfit(name: str, weight: Weight, stored: Stored, scale: str | None) -> str:
    if stored.shape != weight.shape:
        return (
            f"size mismatch for {name}: copying a param with shape {torch.Size(stored.shape)} from checkpoint, the "
            f"shape in current model is {torch.Size(weight.shape)}."
        )
    if stored.dtype.is_complex != weight.dtype.is_complex:
        return f"dtype mismatch for {name}: {stored.dtype} in the checkpoint can't become {weight.dtype}."
    if scale is not None and stored.dtype is not weight.dtype and stored.dtype.itemsize == 1:
        return (
            f"dtype mismatch for {name}: {stored.dtype} in the checkpoint, with scales in {scale} that zerox does not "
            "apply. Load it with from_pretrained() once, which does."
        )
    return ""


def complain(model: str, keys: LoadedKeys, misfitting: Sequence[str]) -> None:
    """CheckpointError with torch's text, if there is anything to say. ``model``: its class's name."""
    lines = [
        f"{what} key(s) in state_dict: {', '.join(repr_of(name) for name in names)}. "
        for what, names in (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys))
        if names
    ]
    if lines or misfitting:
        said = "\n\t".join([*lines, *misfitting])
        raise CheckpointError(f"Error(s) in loading state_dict for {model}:\n\t{said}")


def repr_of(name: str) -> str:
    return f'"{name}"'
