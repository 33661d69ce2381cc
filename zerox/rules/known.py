"""The rules that zerox has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from zerox.rules import adam, lion, muon, sgd
from zerox.rules.of_groups import Rules
from zerox.rules.rule import FLAGS, Rule

KNOWN: dict[str, Rule] = {rule.name: rule for rule in (adam.ADAM, sgd.SGD, lion.LION, muon.MUON)}
DEFAULTS: dict[str, Callable[..., dict[str, Any]]] = {  # of param groups, from what the constructor is given
    adam.ADAM.name: adam.defaults,
    sgd.SGD.name: sgd.defaults,
    lion.LION.name: lion.defaults,
    muon.MUON.name: muon.defaults,
}


def rules_of(name: str) -> Rules:
    """Those of an optimizer whose param groups have this one unless they name another. ValueError if it is unknown."""
    if name not in KNOWN:
        raise ValueError(f"zerox: rule must be one of {sorted(KNOWN)}, got {name!r}")
    return Rules(KNOWN[name], KNOWN)


def options_of(name: str) -> tuple[str, ...]:
    """What the constructor of a rule's class takes for its param groups."""
    return (*KNOWN[name].defaults, *KNOWN[name].flags)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises as the constructor of a rule's class for values among ``options`` that it refuses."""
    make = DEFAULTS[name]
    values = {**KNOWN[name].defaults, **options}
    own = {each: values[each] for each in inspect.signature(make).parameters if each != "flags"}
    make(**own, flags={flag: options.get(flag) for flag in FLAGS})
