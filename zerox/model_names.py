"""Names of parameters in errors: the model's, if the optimizer was given none (most frameworks give it none)."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerox import _torch

POSITION = re.compile(r"param \d+")


def quote(name: str, param: Tensor | None) -> str:
    """``'name'``, and the name in a living model if ``name`` is only a position.

    For errors only: looking through all objects takes some 50 ms.
    """
    return all_quoted([(name, param)])[0]


def name_or_shape(param: Tensor) -> str:
    """What an error calls a parameter that has neither name nor number: by the model's name of it, or by its shape."""
    unnamed = "param 0"
    name = in_text(unnamed, [(unnamed, param)])
    return f"one of shape {tuple(param.shape)}" if name == unnamed else f"'{name}'"


def all_quoted(named: Sequence[tuple[str, Tensor | None]]) -> list[str]:
    """As :func:`quoted`, of many at once, which takes no longer than one."""
    sought = [param if POSITION.fullmatch(name) else None for name, param in named]
    models = _models() if any(param is not None for param in sought) else []
    return [
        f"'{name}' ('{known}' in the model)" if (known := _name_in(models, param)) else f"'{name}'"
        for (name, _), param in zip(named, sought, strict=True)
    ]


def in_text(text: str, named: Sequence[tuple[str, Tensor | None]]) -> str:
    """The same with the model's names of the parameters that it calls by their positions, as the ``named`` are called.

    In single quotes as :func:`quoted` has them; "param 3" elsewhere becomes the model's name, if it has one.
    """
    found = set(POSITION.findall(text))
    sought = [(name, param) for name, param in named if name in found]
    if not sought:
        return text
    models = _models()
    known = {name: _name_in(models, param) for name, param in sought if param is not None}

    def put(match: re.Match[str]) -> str:
        in_quotes, bare = match.groups()
        name = known.get(in_quotes or bare, "")
        if not name:
            return match.group()
        return f"'{in_quotes}' ('{name}' in the model)" if in_quotes else name

    # Not where it stands already.
    return re.sub(r"'(param \d+)'(?! \(')|(?<!')\b(param \d+)\b(?!')", put, text)


class naming:
    """Inside, RuntimeErrors get the model's names of the parameters that they call by positions: see in_text().

    Each step() enters it three times, which a generator would make 3 us longer.
    """

    __slots__ = ("known",)

    def __init__(self, known: Callable[[], Sequence[tuple[str, Tensor | None]]]) -> None:
        self.known = known

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_text(error.args[0], self.known()),)


def _name_in(models: Sequence[Mapping[int, str]], param: Tensor | None) -> str:
    """The name in the largest model that has the parameter; empty if none has."""
    return max(((len(names), names[id(param)]) for names in models if id(param) in names), default=(0, ""))[1]


def model_with(params: Sequence[Tensor]) -> nn.Module | None:
    """The living model with most parameters among those that have one of these; None if none has."""
    wanted = {id(param) for param in params}
    having = [(len(names), model) for model in _roots() if not wanted.isdisjoint(names := _names(model))]
    return max(having, key=lambda each: each[0], default=(0, None))[1]


def models_with(params: Sequence[Tensor]) -> list[nn.Module]:
    """The living models that have all of these, and are inside no other module."""
    wanted = {id(param) for param in params}
    return [model for model in _roots() if wanted <= _names(model).keys()]


def _models() -> list[dict[int, str]]:
    """The names of the parameters of each living model, by id."""
    return [_names(module) for module in _roots()]


def _roots() -> list[nn.Module]:
    """All living modules that are inside no other one."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inside = {id(child) for module in modules for _, child in _of(module, _torch.children_of)}
    return [module for module in modules if id(module) not in inside]


def _names(root: nn.Module) -> dict[int, str]:
    """The dotted name of each parameter, by id."""
    found: dict[int, str] = {}
    seen, waiting = {id(root)}, [(root, "")]
    for module, prefix in waiting:
        for name, param in _of(module, _torch.own_params_of):
            found.setdefault(id(param), prefix + name)
        for name, child in _of(module, _torch.children_of):
            if id(child) not in seen:
                seen.add(id(child))
                is_wrapper = issubclass(type(module), DistributedDataParallel)  # it has no name of its own
                waiting.append((child, prefix if is_wrapper else f"{prefix}{name}."))
    return found


def _of(module: nn.Module, members: Callable[[nn.Module], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The module may be half built, or of an odd class: composing an error must not raise another one."""
    with contextlib.suppress(Exception):
        yield from [(name, each) for name, each in members(module).items() if each is not None]
