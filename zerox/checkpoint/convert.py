"""Converts a checkpoint's folder to one file for torch or safetensors, and torch's file to a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerox.checkpoint.everyone import Everyone
from zerox.checkpoint.from_torch import EXTRA, read_torch_file
from zerox.checkpoint.manifest import WEIGHTS_ALONE, CheckpointError, is_safetensors
from zerox.checkpoint.masks import MASKS, SPARSITY
from zerox.checkpoint.names import MODEL, OPTIMIZER
from zerox.checkpoint.place import find
from zerox.checkpoint.store import Opened, open_checkpoint, write
from zerox.checkpoint.unwrapped import refuse_own
from zerox.checkpoint.writer import save_object
from zerox.memory.forms import decode, master_of
from zerox.memory.stored import SCALE, Stored
from zerox.plan.cut import complete_order
from zerox.rules.adam import ADAM
from zerox.rules.known import KNOWN
from zerox.rules.of_groups import RULE
from zerox.rules.rule import MASK, MASTER, MASTERS, REMAINDER
from zerox.state.sliced_state import STEP

SAFETENSORS = ".safetensors"
FILES = (SAFETENSORS, ".pt", ".pth", ".bin")  # endings that nobody gives to a folder
SPECS = {spec.key: spec for rule in KNOWN.values() for spec in rule.states}
WHATS = (STEP, MASK.key, *(spec.key for spec in MASTERS), *SPECS, *(key + SCALE for key in SPECS))


def convert_file(
    source: Path, target: Path, weights: bool, fp32: bool, keys: tuple[str, str], masks: bool = False
) -> str:
    """Returns a line about what it wrote. ``keys``: of the model and of the optimizer in a file of torch.save.

    ``masks``: those of a zerox.Sparsity beside the weights, which have its zeros in any case.

    Raises CheckpointError for a source that does not fit, FileNotFoundError for none, FileExistsError rather than
    overwrite.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists, and nothing is overwritten: choose another name")
    if not os.path.lexists(find(source)):
        raise FileNotFoundError(f"{source} does not exist: give a checkpoint's folder, or a file of torch.save()")
    if not find(source).is_dir():
        if is_safetensors(source):
            raise CheckpointError(f"{source} is a file of {WEIGHTS_ALONE}")
        if weights or fp32 or masks:
            raise ValueError("--weights, --fp32 and --masks are for a checkpoint's folder")
        if target.suffix in FILES:
            raise ValueError(
                f"{source} is a file, of which a checkpoint's folder is made, and {target} is the name of a file: give "
                "a folder's, and convert that one to a file if you want its weights"
            )
        tensors, host = read_torch_file(source, *keys)
        write(target, tensors, host, Everyone())
        return f"wrote {target}, a checkpoint of {len(tensors)} tensors"
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}, where {target.name} is to be, is no folder")
    if masks and not (weights or target.suffix == SAFETENSORS):
        raise ValueError("--masks is for a file of weights: the optimizer's state has its masks without it")
    opened = open_checkpoint(source, Everyone())
    with Everyone().failing_together(f"{source} could not be converted"):
        refuse_own(opened.host())
        if weights or target.suffix == SAFETENSORS:
            return _weights_to_file(opened, target, fp32, masks)
        return _to_file(opened, target, fp32, keys)


def _weights_to_file(opened: Opened, target: Path, fp32: bool, masks: bool) -> str:
    saved, host = _read(opened, MODEL), opened.host()
    plain = _plain(opened, saved, fp32)
    if masks:
        plain |= _masks_beside(opened, plain)
    if target.suffix == SAFETENSORS:
        wrote = _put(target, plain, _save_safetensors)
    else:
        wrote = _put(target, {**plain, **host["model"]}, _save_torch)
    left_out = "; its masks are left out, and --masks writes them beside the weights"
    return wrote + (left_out if SPARSITY in host and not masks else "")


def _plain(opened: Opened, saved: Mapping[str, Tensor], fp32: bool) -> dict[str, Tensor]:
    """The model's tensors by the names that they have in it; ``fp32``: exact where there are masters."""
    tensors = {**saved, **(_in_fp32(opened, saved) if fp32 else {})}
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def _masks_beside(opened: Opened, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """bool, True where an element is kept, as ``weight_mask`` beside ``weight``."""
    found = {}
    for key, kept in _read(opened, OPTIMIZER, (f".{MASK.key}",)).items():
        found[key.removeprefix(OPTIMIZER).removesuffix(f".{MASK.key}") + MASKS] = kept.bool()
    if not found:
        raise CheckpointError("it has no masks to write with --masks")
    if taken := found.keys() & weights.keys():
        raise CheckpointError(f"the model has a tensor {min(taken)} of its own, where --masks would write a mask")
    return found


def _to_file(opened: Opened, target: Path, fp32: bool, keys: tuple[str, str]) -> str:
    saved, host = _read(opened, MODEL), opened.host()
    plain = _plain(opened, saved, fp32)
    state = _torch_state(opened, saved, host)
    masks = {SPARSITY: host[SPARSITY]} if SPARSITY in host else {}
    content = {keys[0]: {**plain, **host["model"]}, keys[1]: state, EXTRA: host["extra"], **masks}
    return _put(target, content, _save_torch)


def _put(target: Path, content: Any, save: Callable[[Any, Path], Any]) -> str:
    """Writes all of a file or nothing, and overwrites nothing."""
    part = target.with_name(f".{target.name}.saving")
    try:
        part.touch(exist_ok=False)
    except FileExistsError:
        raise FileExistsError(f"{part} exists: another conversion writes it, or was killed; if so remove it") from None
    try:
        save(content, part)
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists, and was not there a moment ago")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return f"wrote {target}, {target.stat().st_size / 1e6:,.1f} MB"


def _save_torch(content: Any, file: Path) -> None:
    save_object(content, file, mode="wb")


def _save_safetensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("a .safetensors file needs the package safetensors: pip install safetensors") from error
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from None


# ---- from a checkpoint


def _read(opened: Opened, prefix: str, suffixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Whole tensors by their names in the checkpoint."""
    wanted = {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
        for name, about in opened.tensors.items()
        if name.startswith(prefix) and name.endswith(suffixes)
    }
    opened.read(wanted)
    return wanted


def _in_fp32(opened: Opened, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """16-bit weights in float32, by their names in the checkpoint: their masters, if they have one."""
    halves = (torch.bfloat16, torch.float16)
    found = {name: tensor.float() for name, tensor in weights.items() if tensor.dtype in halves}
    masters = _read(opened, OPTIMIZER, tuple(f".{spec.key}" for spec in MASTERS))
    for key, master in masters.items():
        name, _, what = key.removeprefix(OPTIMIZER).rpartition(".")
        if MODEL + name in found:
            found[MODEL + name] = master if what == MASTER.key else master_of(weights[MODEL + name], master)
    return found


def _torch_state(opened: Opened, weights: Mapping[str, Tensor], host: Mapping[str, Any]) -> dict[str, Any]:
    """State for load_state_dict() of the torch.optim class, float32, with masters beside it as in full_state_dict()."""
    everything = _read(opened, OPTIMIZER)
    state: dict[int, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in host["groups"]:
        options = {key: value for key, value in group.items() if key != "names"}
        groups.append({**options, "params": list(range(number, number + len(group["names"])))})
        groups[-1]["param_names"] = list(group["names"])
        for name in group["names"]:
            prefix = f"{OPTIMIZER}{name}."
            whats = WHATS if group.get(RULE, ADAM.name) in KNOWN else _whats(prefix, everything)
            # Taken out: what is decoded replaces what was read, and both at once would be a file and a half of memory.
            own = {what: everything.pop(prefix + what) for what in whats if prefix + what in everything}
            if own and (whats is WHATS or own[STEP] > 0):  # a class of the user's need not begin with zeros
                state[number] = _torchs(own, weights.get(MODEL + name), host["memory_order"].get(name))
            number += 1
    return {"state": state, "param_groups": groups}


def _whats(prefix: str, everything: Mapping[str, Tensor]) -> list[str]:
    """What there is of a parameter whose class only its optimizer knows. Keys have no dots (zerox/rules/probe.py)."""
    found = [name.removeprefix(prefix) for name in everything if name.startswith(prefix)]
    return [what for what in found if "." not in what]


def _torchs(saved: Mapping[str, Tensor], weight: Tensor | None, order: list[int] | None) -> dict[str, Tensor]:
    found = {STEP: saved[STEP].float()}
    found |= {what: value for what, value in saved.items() if what not in WHATS}
    for spec in SPECS.values():
        if spec.key in saved:
            stored = Stored.given(spec, saved[spec.key], saved.get(spec.key + SCALE))
            values, scales = stored.values, stored.scales
            if scales is not None and scales.dim() == 2:  # a table's, by rows
                values = decode(stored)
            elif scales is not None:
                dims = complete_order(order, values.dim())
                in_order = decode(replace(stored, values=values.permute(dims).reshape(-1))).view(
                    [values.shape[dim] for dim in dims]
                )
                values = in_order.permute([dims.index(dim) for dim in range(len(dims))])
            found[spec.key] = values.contiguous() if values.dtype is torch.float64 else values.float().contiguous()
    if MASK.key in saved:
        found[MASK.key] = saved[MASK.key]
    if MASTER.key in saved:
        found[MASTER.key] = saved[MASTER.key]
    elif REMAINDER.key in saved and weight is not None:
        found[MASTER.key] = master_of(weight, saved[REMAINDER.key])
    return found
