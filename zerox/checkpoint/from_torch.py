"""Reads a file of torch.save() with a model's and AdamW's state_dict() as the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerox.checkpoint.groups import NOT_OPTIONS
from zerox.checkpoint.manifest import CheckpointError, some
from zerox.checkpoint.names import MODEL, OPTIMIZER
from zerox.checkpoint.reader import loaded
from zerox.rules.adam import ADAM
from zerox.rules.rule import MASTER
from zerox.state.sliced_state import STEP

EXTRA = "extra"
NEEDED = (STEP, *(spec.key for spec in ADAM.states if not spec.when))
KNOWN = (STEP, *(spec.key for spec in ADAM.states), MASTER.key)
NOT_ADAMW = (
    "this is not the state of AdamW or Adam, and zerox has no use for another optimizer's: load the model's "
    "state_dict() alone, and start with new state"
)
OFF = {spec.when: False for spec in ADAM.states if spec.when}  # options that old files lack


def read_torch_file(source: Path, model_key: str, optimizer_key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by their names in a checkpoint, what else is in one). Raises CheckpointError for any other file."""
    content = loaded(source)
    if not isinstance(content, dict) or model_key not in content or optimizer_key not in content:
        has = sorted(map(str, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{source} should be a dict with '{model_key}' and '{optimizer_key}', and has {has}: "
            "see --model-key and --optimizer-key"
        )
    weights, state = content[model_key], content[optimizer_key]
    _check_form(source, model_key, weights, optimizer_key, state)
    rest = {key: value for key, value in content.items() if key not in (model_key, optimizer_key)}
    names = _names_of(source, weights, state)
    _check_adamw(source, names, state)
    tensors = {MODEL + name: value for name, value in weights.items() if isinstance(value, Tensor)}
    for number, own in state["state"].items():
        for what, value in own.items():
            kept = torch.as_tensor(value, device="cpu")
            dtype = torch.int64 if what == STEP else torch.float32 if kept.dtype is torch.float16 else kept.dtype
            tensors[f"{OPTIMIZER}{names[number]}.{what}"] = kept.to(dtype)
    groups = []
    for group in state["param_groups"]:
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        groups.append({**OFF, **options, "names": [names[number] for number in group["params"]]})
    others = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    extra = rest[EXTRA] if set(rest) == {EXTRA} else rest or None
    return tensors, {"groups": groups, "memory_order": {}, "model": others, "extra": extra}


def _check_form(source: Path, model_key: str, weights: Any, optimizer_key: str, state: Any) -> None:
    """CheckpointError unless they are state_dict()s of a model and of an optimizer."""
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(
            f"{source}: '{model_key}' is not a model's state_dict(), which has tensors by their names: see --model-key"
        )
    is_dict = isinstance(state, dict) and isinstance(state.get("state"), dict)
    groups = state.get("param_groups") if is_dict else None
    if (
        not isinstance(groups, list)
        or not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        or not all(isinstance(own, dict) for own in state["state"].values())
    ):
        raise CheckpointError(
            f"{source}: '{optimizer_key}' is not an optimizer's state_dict(), which has 'state' and 'param_groups': "
            "see --optimizer-key"
        )


def _check_adamw(source: Path, names: Mapping[int, str], state: Mapping[str, Any]) -> None:
    """CheckpointError for another optimizer's state: a training would go on without its moments."""
    for number, own in state["state"].items():
        if number not in names:
            raise CheckpointError(f"{source} has state of parameter {number}, which no param group has")
        missing = [what for what in NEEDED if what not in own]
        unknown = [str(what) for what in own if what not in KNOWN]
        if missing or unknown:
            wrong = [f"has no {some(missing)}"] * bool(missing) + [f"has {some(unknown)}"] * bool(unknown)
            raise CheckpointError(f"{source}: the state of '{names[number]}' {' and '.join(wrong)}: {NOT_ADAMW}")
        for what, value in own.items():
            if not isinstance(value, (Tensor, int, float)) or (what != STEP and not isinstance(value, Tensor)):
                raise CheckpointError(f"{source}: {what} of '{names[number]}' is a {type(value).__name__}")
    for index, group in enumerate(state["param_groups"]):
        if missing := [name for name in ADAM.needed_options if name not in group]:
            raise CheckpointError(f"{source}: param group {index} has no {some(missing)}: {NOT_ADAMW}")


def _names_of(source: Path, weights: Mapping[str, Any], state: Mapping[str, Any]) -> dict[int, str]:
    """Parameters' names by number: those given to the optimizer, else the model's, which are in the same order."""
    found: dict[int, str] = {}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for group in state["param_groups"]:
        found |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
    if len(found) < len(numbers):
        shape_of = NEEDED[-1]
        shapes = {number: own[shape_of].shape for number, own in state["state"].items() if shape_of in own}
        likely = list(weights)
        if len(likely) != len(numbers) or any(weights[likely[n]].shape != shape for n, shape in shapes.items()):
            raise CheckpointError(
                f"{source}: the model has {len(likely)} tensors and the optimizer {len(numbers)} parameters without "
                "names, so it can't be told which is which: build the optimizer with model.named_parameters() and save "
                "again"
            )
        found = dict(enumerate(likely))
    return found
