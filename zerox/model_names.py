"""Names of parameters in errors: the model's, if the optimizer was given none (most frameworks give it none)."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

POSITION = re.compile(r"param \d+")


def quoted(name: str, param: Tensor | None) -> str:
    """``'name'``, and the name in a living model if ``name`` is only a position.

    For errors only: looking through all objects takes some 50 ms.
    """
    if param is None or not POSITION.fullmatch(name):
        return f"'{name}'"
    known = _name_in_model(param)
    return f"'{name}' ('{known}' in the model)" if known else f"'{name}'"


def _name_in_model(param: Tensor) -> str:
    """The name in the largest model that has the parameter; empty if none has."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inside = {id(child) for module in modules for _, child in _of(module, "_modules")}
    models = [_names(module) for module in modules if id(module) not in inside]
    return max(((len(names), names[id(param)]) for names in models if id(param) in names), default=(0, ""))[1]


def _names(root: nn.Module) -> dict[int, str]:
    """The dotted name of each parameter, by id."""
    found: dict[int, str] = {}
    seen, waiting = {id(root)}, [(root, "")]
    for module, prefix in waiting:
        for name, param in _of(module, "_parameters"):
            found.setdefault(id(param), prefix + name)
        for name, child in _of(module, "_modules"):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, f"{prefix}{name}."))
    return found


def _of(module: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """The module may be half built, or of an odd class: composing an error must not raise another one."""
    with contextlib.suppress(Exception):
        yield from [(name, each) for name, each in getattr(module, kind).items() if each is not None]
