"""The rules that there are kernels for."""

from __future__ import annotations

from zerox.rules.adam import ADAM
from zerox.rules.lion import LION
from zerox.rules.of_groups import Rules
from zerox.rules.rule import Rule
from zerox.rules.sgd import SGD

KNOWN: dict[str, Rule] = {rule.name: rule for rule in (ADAM, SGD, LION)}


def rules_of(name: str) -> Rules:
    """Those of an optimizer whose param groups have this one unless they name another. ValueError if it is unknown."""
    if name not in KNOWN:
        raise ValueError(f"rule must be one of {sorted(KNOWN)}, got {name!r}")
    return Rules(KNOWN[name], KNOWN)
