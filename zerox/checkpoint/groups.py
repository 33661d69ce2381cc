"""Param groups in a checkpoint: options by parameters' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerox.checkpoint.manifest import CheckpointError
from zerox.engine import Engine
from zerox.rules.of_groups import RULE
from zerox.state.state_dict import say_what_stays, take_options

NOT_OPTIONS = ("params", "param_names")
NONE: Mapping[int, str] = {}


def groups_by_name(optimizer: Engine, names: Mapping[int, str], own: Mapping[int, str] = NONE) -> list[dict[str, Any]]:
    """Each group's options, its rule among them, and under "names" its parameters'.

    ``names``: of those that ranks share, by number. ``own``: of this rank's own, by id, which come after these.
    """
    of_group: list[list[str]] = [[] for _ in optimizer.param_groups]
    for member in sorted(optimizer.inside.members, key=lambda each: each.number):
        of_group[member.group].append(names[member.number])
    for found, group in zip(of_group, optimizer.param_groups, strict=True):
        found.extend(own[id(param)] for param in (group["params"] if own else ()) if id(param) in own)
    return [
        {
            RULE: optimizer.inside.rules.of(group).name,
            **{key: value for key, value in group.items() if key not in NOT_OPTIONS},
            "names": of_group[index],
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def check_rules(
    optimizer: Engine, names: Mapping[int, str], saved: list[dict[str, Any]], own: Mapping[int, str] = NONE
) -> None:
    """CheckpointError naming the first param group that has parameters which were saved with another rule."""
    of_name = {name: group for group in saved for name in group["names"]}
    for index, live in enumerate(groups_by_name(optimizer, names, own)):
        for known in (of_name[name] for name in live["names"] if name in of_name):
            if why := optimizer.inside.rules.misfit(live, known):
                raise CheckpointError(f"param group {index} {why}")


def groups_to_fill(
    optimizer: Engine, names: Mapping[int, str], saved: list[dict[str, Any]], own: Mapping[int, str] = NONE
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group with the one that its parameters were in. CheckpointError if they had different options."""
    of_name = {name: index for index, group in enumerate(saved) for name in group["names"]}
    found = []
    live = groups_by_name(optimizer, names, own)
    for index, (group, named) in enumerate(zip(optimizer.param_groups, live, strict=True)):
        had = sorted({of_name[name] for name in named["names"] if name in of_name})
        options = [{key: value for key, value in saved[each].items() if key != "names"} for each in had]
        if any(each != options[0] for each in options[1:]):
            raise CheckpointError(f"parameters of param group {index} were saved in groups {had}: their options differ")
        found += [(group, saved[had[0]])] if had else []
    return found


def fill_groups(optimizer: Engine, found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Gives groups the options that were saved."""
    rules = optimizer.inside.rules
    say_what_stays(rules, found)
    for group, known in found:
        for key, value in take_options(rules, group, known).items():
            now = group.get(key)
            if key == "names":
                continue
            if isinstance(now, Tensor):
                now.fill_(float(value))
            else:
                group[key] = float(value) if isinstance(value, Tensor) and key == "lr" else value
