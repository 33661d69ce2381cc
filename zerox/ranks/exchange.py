"""How gradients and parameters travel: by the constructor's option, or by the variable, which wins over it."""

from __future__ import annotations

import os

from zerox.plan.environment import EXCHANGE
from zerox.ranks.calls import warn_caller

EXCHANGES = ("direct", "messages", "native")

_said: set[tuple[str, str]] = set()  # options, and what won over them


def choose_exchange(option: str | None, backend: str, rank: int, has_owners: bool = False) -> str:
    """One of EXCHANGES. ``option``: the constructor's, which has been checked. ``has_owners``: parameters may lie whole
    on one rank, and native collectives move equal shards.

    Warns rank 0 once where the variable wins over it. ValueError for a variable that is none of EXCHANGES.
    """
    variable = os.environ.get(EXCHANGE)
    if not variable:
        return option or default_exchange(backend, has_owners)
    if variable not in EXCHANGES:
        raise ValueError(f"{EXCHANGE} must be one of {EXCHANGES}, got '{variable}'")
    if option not in (None, variable) and rank == 0 and (option, variable) not in _said:
        _said.add((option, variable))
        warn_caller(
            f"zerox: exchange={option!r} has no effect, since {EXCHANGE}={variable} wins over it: unset the variable, "
            "or leave exchange out"
        )
    return variable


def default_exchange(backend: str, has_owners: bool = False) -> str:
    return "direct" if backend == "gloo" or has_owners else "native"
