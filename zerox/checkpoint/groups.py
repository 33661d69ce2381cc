"""Param groups in a checkpoint: options by parameters' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerox.checkpoint.manifest import CheckpointError
from zerox.engine import Engine
from zerox.rules.of_groups import RULE
from zerox.state.state_dict import say_what_stays, taken_options

NOT_OPTIONS = ("params", "param_names")


def groups_by_name(optimizer: Engine, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Each group's options, its rule among them, and under "names" its parameters'."""
    of_group: list[list[str]] = [[] for _ in optimizer.param_groups]
    for member in sorted(optimizer.inside.members, key=lambda each: each.number):
        of_group[member.group].append(names[member.number])
    return [
        {
            RULE: optimizer.inside.rules.of(group).name,
            **{key: value for key, value in group.items() if key not in NOT_OPTIONS},
            "names": of_group[index],
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def check_rules(optimizer: Engine, names: Mapping[int, str], saved: list[dict[str, Any]]) -> None:
    """CheckpointError naming the first param group that has parameters which were saved with another rule."""
    of_name = {name: group for group in saved for name in group["names"]}
    for index, own in enumerate(groups_by_name(optimizer, names)):
        for known in (of_name[name] for name in own["names"] if name in of_name):
            if why := optimizer.inside.rules.misfit(own, known):
                raise CheckpointError(f"param group {index} {why}")


def fill_groups(optimizer: Engine, names: Mapping[int, str], saved: list[dict[str, Any]]) -> None:
    """Gives each group the options that its parameters had. CheckpointError if they had different ones."""
    of_name = {name: index for index, group in enumerate(saved) for name in group["names"]}
    rules = optimizer.inside.rules
    found = []
    for index, (group, own) in enumerate(zip(optimizer.param_groups, groups_by_name(optimizer, names), strict=True)):
        had = sorted({of_name[name] for name in own["names"] if name in of_name})
        options = [{key: value for key, value in saved[each].items() if key != "names"} for each in had]
        if any(each != options[0] for each in options[1:]):
            raise CheckpointError(f"parameters of param group {index} were saved in groups {had}: their options differ")
        found += [(group, saved[had[0]])] if had else []
    say_what_stays(rules, found)
    for group, known in found:
        for key, value in taken_options(rules, group, known).items():
            now = group.get(key)
            if key == "names":
                continue
            if isinstance(now, Tensor):
                now.fill_(float(value))
            else:
                group[key] = float(value) if isinstance(value, Tensor) and key == "lr" else value
