"""What the constructor makes of parameters and options, for zerox.estimate: there is no optimizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import Tensor

from zerox.options import OF_LOCAL_OPTIMIZERS, Inside, LocalOptimizerOptions, OptimizerOptions, check_foreign
from zerox.plan.owners import WHOLE
from zerox.ranks.model_axes import axes_of
from zerox.rules.known import check_options, options_of, rules_of
from zerox.rules.local_optimizer import LocalOptimizerClass, full_name
from zerox.rules.of_groups import Rules

# Of the constructors' arguments, those that are no options.
OF_ALL = ("process_group", "norm_group", "model", "init", "optimizer_class")
Named = tuple[str, Tensor, dict[str, Any]]


def chosen_by(rule: str, options: dict[str, Any]) -> tuple[OptimizerOptions, Rules, dict[str, Any]]:
    """As the constructor with these ``options``: ShardedOptimizer's, if a class is among them.

    The last are what param groups take from the constructor, beside the defaults of their rule.
    """
    axes_of(options.get("norm_group"))
    cls = options.get("optimizer_class")
    if cls is None:
        rules = rules_of(rule)
        known = {field.name for field in fields(OptimizerOptions)}
        chosen = OptimizerOptions(**{name: value for name, value in options.items() if name in known})
        chosen.check_pairs({"rule": rule, **options})  # which know of options that only other rules have
        taken = {*known, *options_of(rule), *OF_ALL}
        if unknown := [name for name in options if name not in taken]:
            near = difflib.get_close_matches(unknown[0], taken, n=1)
            raise TypeError(
                f"zerox.estimate() got an unexpected keyword argument '{unknown[0]}', which the optimizer of "
                f'rule="{rule}" does not take' + (f": did you mean '{near[0]}'?" if near else "")
            )
        check_options(rule, options)
        return chosen, rules, options
    own = {name: value for name, value in options.items() if name in OF_LOCAL_OPTIMIZERS}
    elementwise, whole = options.get("elementwise"), options.get("whole", WHOLE[0])
    others = (*OF_LOCAL_OPTIMIZERS, "elementwise", "whole", *OF_ALL)
    of_class = {name: value for name, value in options.items() if name not in others}
    check_foreign(cls, of_class)
    has_masters = own.get("master_weights", "auto") is not None
    local = LocalOptimizerClass(cls, of_class, elementwise is True, has_masters, whole=whole)
    return LocalOptimizerOptions(**own, inside=Inside(full_name(cls), elementwise, whole)), local.rules(), {}


def given_params(rules: Rules, named: Iterable[Named], options: dict[str, Any]) -> list[Named]:
    """Parameters with their groups, completed as the constructor with these ``options`` does it. ``params`` of a group
    are tensors, as in torch's groups."""
    completed: dict[int, dict[str, Any]] = {}
    found = []
    for name, tensor, group in named:
        if id(group) not in completed:
            completed[id(group)] = {**_completed(rules, group, options), "params": []}
        completed[id(group)]["params"].append(tensor)
        found.append((name, tensor, completed[id(group)]))
    return found


def _completed(rules: Rules, group: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """As the constructor with these ``options`` completes a param group."""
    found = dict(group)
    rules.complete(found, "a param group", options)
    return {**rules.of(found).defaults, **(options if rules.of(found) is rules.default else {}), **found}
