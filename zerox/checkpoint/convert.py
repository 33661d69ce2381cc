"""A checkpoint's folder to one file as torch has it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerox.bucket import MASTER, REMAINDER
from zerox.checkpoint.everyone import Everyone
from zerox.checkpoint.groups import NOT_OPTIONS
from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.names import MODEL, OPTIMIZER
from zerox.checkpoint.saved_state import MOMENTS
from zerox.checkpoint.store import Opened, open_checkpoint, write
from zerox.moments import SCALE
from zerox.sliced_state import STEP
from zerox.stored_forms import decoded, master_of

SAFETENSORS = ".safetensors"
EXTRA = "extra"
WHATS = (STEP, MASTER, REMAINDER, *MOMENTS, *(name + SCALE for name in MOMENTS))


def convert_file(source: Path, target: Path, weights: bool, fp32: bool, keys: tuple[str, str]) -> str:
    """Says what it wrote. ``keys``: of the model and of the optimizer in a file of torch.save.

    Raises CheckpointError for a source that is not what it should be, FileExistsError rather than overwrite.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists")
    if not source.is_dir():
        if weights or fp32:
            raise ValueError("--weights and --fp32 are for a checkpoint's folder")
        return _to_folder(source, target, *keys)
    opened = open_checkpoint(source, Everyone(None, alone=True))
    saved, host = _read(opened, MODEL), opened.host()
    tensors = {**saved, **(_in_fp32(opened, saved) if fp32 else {})}
    plain = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
    if target.suffix == SAFETENSORS:
        return _put(target, plain, _save_safetensors)
    if weights:
        return _put(target, {**plain, **host["model"]}, torch.save)
    state = _adamw_state(opened, saved, host)
    return _put(target, {keys[0]: {**plain, **host["model"]}, keys[1]: state, EXTRA: host["extra"]}, torch.save)


def _put(target: Path, content: Any, save: Any) -> str:
    """Complete or not there."""
    part = target.with_name(f".{target.name}.saving")
    try:
        save(content, part)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return f"wrote {target}, {target.stat().st_size / 1e6:,.1f} MB"


def _save_safetensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("a .safetensors file needs the package safetensors: pip install safetensors") from error
    save_file(tensors, file, metadata={"format": "pt"})


# ---- from a checkpoint


def _read(opened: Opened, prefix: str, suffixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Whole tensors by their names in the checkpoint."""
    wanted = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in opened.tensors.items()
        if name.startswith(prefix) and name.endswith(suffixes)
    }
    opened.read(wanted)
    return wanted


def _in_fp32(opened: Opened, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of 16 bits by their names in the checkpoint, from their masters where they have one."""
    halves = (torch.bfloat16, torch.float16)
    found = {name: tensor.float() for name, tensor in weights.items() if tensor.dtype in halves}
    masters = _read(opened, OPTIMIZER, (f".{MASTER}", f".{REMAINDER}"))
    for key, master in masters.items():
        name, _, what = key.removeprefix(OPTIMIZER).rpartition(".")
        if MODEL + name in found:
            found[MODEL + name] = master if what == MASTER else master_of(weights[MODEL + name], master)
    return found


def _adamw_state(opened: Opened, weights: Mapping[str, Tensor], host: Mapping[str, Any]) -> dict[str, Any]:
    """What torch.optim.AdamW.load_state_dict() takes, float32; masters beside it as full_state_dict() has them."""
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
            own = {what: everything[prefix + what] for what in WHATS if prefix + what in everything}
            if own:
                state[number] = _torchs(own, weights.get(MODEL + name), host["memory_order"].get(name))
            number += 1
    return {"state": state, "param_groups": groups}


def _torchs(saved: Mapping[str, Tensor], weight: Tensor | None, order: list[int] | None) -> dict[str, Tensor]:
    found = {STEP: saved[STEP].float()}
    for name in MOMENTS:
        if name in saved:
            values = saved[name]
            if name + SCALE in saved:
                dims = order or list(range(values.dim()))
                dims = [*dims, *(dim for dim in range(values.dim()) if dim not in dims)]
                flat = values.permute(dims).reshape(-1)
                in_order = decoded(name, flat, saved[name + SCALE]).view([values.shape[dim] for dim in dims])
                values = in_order.permute([dims.index(dim) for dim in range(len(dims))])
            found[name] = values.contiguous() if values.dtype is torch.float64 else values.float().contiguous()
    if MASTER in saved:
        found[MASTER] = saved[MASTER]
    elif REMAINDER in saved and weight is not None:
        found[MASTER] = master_of(weight, saved[REMAINDER])
    return found


# ---- to a checkpoint


def _to_folder(source: Path, target: Path, model_key: str, optimizer_key: str) -> str:
    content = torch.load(source, weights_only=True, map_location="cpu")
    if not isinstance(content, dict) or model_key not in content or optimizer_key not in content:
        has = sorted(map(str, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{source} should be a dict with '{model_key}' and '{optimizer_key}', and has {has}: "
            "see --model-key and --optimizer-key"
        )
    weights, state = content[model_key], content[optimizer_key]
    rest = {key: value for key, value in content.items() if key not in (model_key, optimizer_key)}
    names = _names_of(source, weights, state)
    tensors = {MODEL + name: value for name, value in weights.items() if isinstance(value, Tensor)}
    for number, own in state["state"].items():
        for what, value in own.items():
            if what in (STEP, MASTER, *MOMENTS):
                kept = torch.as_tensor(value)
                dtype = torch.int64 if what == STEP else torch.float32 if kept.dtype is torch.float16 else kept.dtype
                tensors[f"{OPTIMIZER}{names[number]}.{what}"] = kept.to(dtype)
    groups = []
    for group in state["param_groups"]:
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        groups.append({"amsgrad": False, **options, "names": [names[number] for number in group["params"]]})
    others = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    extra = rest[EXTRA] if set(rest) == {EXTRA} else rest or None
    host = {"groups": groups, "memory_order": {}, "model": others, "extra": extra}
    write(target, tensors, host, Everyone(None, alone=True))
    return f"wrote {target}, a checkpoint of {len(tensors)} tensors"


def _names_of(source: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[int, str]:
    """Parameters' names by number: those that the optimizer was given, else the model's, whose order is the same."""
    found: dict[int, str] = {}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for group in state["param_groups"]:
        found |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
    if len(found) < len(numbers):
        shapes = {number: own["exp_avg"].shape for number, own in state["state"].items() if "exp_avg" in own}
        likely = list(weights)
        if len(likely) != len(numbers) or any(weights[likely[n]].shape != shape for n, shape in shapes.items()):
            raise CheckpointError(
                f"{source}: the model has {len(likely)} tensors and the optimizer {len(numbers)} parameters without "
                "names, so it can't be told which is which: build the optimizer with model.named_parameters() and save "
                "again"
            )
        found = dict(enumerate(likely))
    return found
