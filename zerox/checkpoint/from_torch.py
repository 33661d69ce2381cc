"""Reads a file of torch.save() with a model's and an optimizer's state_dict() as the contents of a checkpoint.

The optimizer is one that zerox has the rule of: AdamW, Adam or SGD of torch.optim, or zerox's own in torch's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerox.checkpoint.groups import NOT_OPTIONS
from zerox.checkpoint.manifest import CheckpointError, some
from zerox.checkpoint.masks import SPARSITY
from zerox.checkpoint.names import MODEL, OPTIMIZER
from zerox.checkpoint.reader import load_file
from zerox.memory.stored import form_of
from zerox.rules.known import KNOWN, rules_of
from zerox.rules.of_groups import RULE
from zerox.rules.rule import MASK, MASTER, Rule
from zerox.state.sliced_state import STEP

EXTRA = "extra"
RULES = rules_of("adam")
NO_RULE = (
    "this is not the state of AdamW, Adam or SGD, and zerox has no rule for another optimizer: load the model's "
    "state_dict() alone, and start with new state"
)


def read_torch_file(source: Path, model_key: str, optimizer_key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by their names in a checkpoint, what else is in one). Raises CheckpointError for any other file."""
    content = load_file(source)
    if not isinstance(content, dict) or model_key not in content or optimizer_key not in content:
        has = sorted(map(str, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{source} should be a dict with '{model_key}' and '{optimizer_key}', and has {has}: "
            "see --model-key and --optimizer-key"
        )
    weights, state = content[model_key], content[optimizer_key]
    _check_form(source, model_key, weights, optimizer_key, state)
    rest = {key: value for key, value in content.items() if key not in (model_key, optimizer_key)}
    masks = _masks_of(source, state["state"], rest)
    names = _names_of(source, weights, state)
    rules = _rules_of(source, state["param_groups"])
    _check_state(source, names, rules, state["state"])
    tensors = {MODEL + name: value for name, value in weights.items() if isinstance(value, Tensor)}
    for number, own in state["state"].items():
        kept = {what: torch.as_tensor(value, device="cpu") for what, value in own.items() if value is not None}
        if STEP not in kept:  # its class keeps none
            kept[STEP] = torch.tensor(len(kept) > 0, device="cpu")
        for what, value in kept.items():
            dtype = torch.int64 if what == STEP else torch.float32 if value.dtype is torch.float16 else value.dtype
            tensors[f"{OPTIMIZER}{names[number]}.{what}"] = value.to(dtype)
    groups = []
    for group in state["param_groups"]:
        rule = RULES.of_saved(group)
        assert rule is not None
        off = {spec.when: rule.defaults[spec.when] for spec in rule.states if spec.when}  # that old files lack
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        groups.append({RULE: rule.name, **off, **options, "names": [names[number] for number in group["params"]]})
    others = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    extra = rest[EXTRA] if set(rest) == {EXTRA} else rest or None
    return tensors, {"groups": groups, "memory_order": {}, "model": others, "extra": extra, **masks}


def _masks_of(source: Path, state: Mapping[int, dict[str, Any]], rest: dict[str, Any]) -> dict[str, Any]:
    """What the Sparsity of its masks was, taken out of ``rest``. CheckpointError for masks without it."""
    if not any(own.get(MASK.key) is not None for own in state.values()):
        return {}
    found = rest.pop(SPARSITY, None)
    if not isinstance(found, dict) or not {"targets", "count"} <= found.keys():
        raise CheckpointError(
            f"{source} has masks, and not of which zerox.Sparsity: put the state_dict() of that one beside the "
            f"optimizer's, as '{SPARSITY}'"
        )
    return {SPARSITY: found}


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


def _rules_of(source: Path, groups: list[dict[str, Any]]) -> dict[int, Rule]:
    """The rule of each parameter, by number. CheckpointError for groups of an optimizer that zerox has no rule for."""
    found: dict[int, Rule] = {}
    for index, group in enumerate(groups):
        rule = RULES.of_saved(group)
        if rule is None:
            options = [str(key) for key in group if key not in NOT_OPTIONS]
            raise CheckpointError(f"{source}: param group {index} has {some(options)}: {NO_RULE}")
        found |= dict.fromkeys(group["params"], rule)
    return found


def _check_state(
    source: Path, names: Mapping[int, str], rules: Mapping[int, Rule], state: Mapping[int, dict[str, Any]]
) -> None:
    """CheckpointError for another optimizer's state: a training would go on without it."""
    for number, own in state.items():
        if number not in names:
            raise CheckpointError(f"{source} has state of parameter {number}, which no param group has")
        rule = rules[number]
        needed = [STEP] * rule.keeps_step + [spec.key for spec in rule.states if not spec.when]
        known = [STEP, *(spec.key for spec in rule.states), MASTER.key, MASK.key]
        if coded := [what for what, value in own.items() if isinstance(value, Tensor) and _is_coded(value)]:
            raise CheckpointError(
                f"{source}: {coded[0]} of '{names[number]}' is of 8 bits, as zerox's state_dict() has it: save "
                "optimizer.full_state_dict() instead, or call zerox.save() where the optimizer is"
            )
        missing = [what for what in needed if what not in own]
        unknown = [str(what) for what in own if what not in known]
        if missing or unknown:
            wrong = [f"has no {some(missing)}"] * bool(missing) + [f"has {some(unknown)}"] * bool(unknown)
            raise CheckpointError(f"{source}: the state of '{names[number]}' {' and '.join(wrong)}: {NO_RULE}")
        for what, value in own.items():
            if value is None and not rule.keeps_step:
                continue  # as torch.optim.SGD has its momentum before the first step
            if not isinstance(value, (Tensor, int, float)) or (what != STEP and not isinstance(value, Tensor)):
                raise CheckpointError(f"{source}: {what} of '{names[number]}' is a {type(value).__name__}")


def _is_coded(value: Tensor) -> bool:
    return form_of(None, value.dtype).scaled


def _names_of(source: Path, weights: Mapping[str, Any], state: Mapping[str, Any]) -> dict[int, str]:
    """Parameters' names by number: those given to the optimizer, else the model's, which are in the same order."""
    found: dict[int, str] = {}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for group in state["param_groups"]:
        found |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
    if len(found) < len(numbers):
        keys = [spec.key for rule in KNOWN.values() for spec in rule.states]
        shapes = {
            number: own[key].shape
            for number, own in state["state"].items()
            for key in keys
            if isinstance(own.get(key), Tensor)
        }
        likely = list(weights)
        if len(likely) != len(numbers) or any(weights[likely[n]].shape != shape for n, shape in shapes.items()):
            raise CheckpointError(
                f"{source}: the model has {len(likely)} tensors and the optimizer {len(numbers)} parameters without "
                "names, so it can't be told which is which: build the optimizer with model.named_parameters() and save "
                "again"
            )
        found = dict(enumerate(likely))
    return found
