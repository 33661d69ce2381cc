"""Dynamo, and the functions that it compiles. What it has no public name for is asked for, and done without."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from zerox import _C as C
from zerox import _torch

F = TypeVar("F", bound=Callable[..., Any])


def keep_from_dynamo(function: Callable[..., Any], with_calls: bool = True) -> bool:
    """Keeps Dynamo from compiling a function by itself, as it does a compiled module's hook; False if it can't be kept.

    ``with_calls``: nor what it calls. Where Dynamo compiles what calls the function, it still looks into it.
    """
    return _torch.skip_frames(function.__code__, with_calls)


def run_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """What to call instead of a function that does other things where Dynamo compiles it: if possible, the same.

    Else torch.compiler.disable()'s, which takes a second to import, and at which Dynamo stops: this warns.
    """
    if keep_from_dynamo(function):
        return function
    warnings.warn(
        f"zerox: torch {torch.__version__} lacks names by which overlap_gather() tells Dynamo of its hooks: what "
        "torch.compile makes of a model breaks into a graph for each module, and fullgraph=True raises. Without "
        "overlap_gather() neither is so",
        stacklevel=5,
    )
    try:
        return torch.compiler.disable(function, reason="a hook of zerox's overlap_gather()")  # type: ignore[no-any-return]
    except (ImportError, AttributeError):  # Dynamo itself lacks them, and compiles nothing
        return function


def calls_untraced(cls: type) -> None:
    """Has Dynamo call the public methods of a class of ours, and those of its bases, as they are.

    Who compiles a whole step (forward, backward, step()) would else have it trace all of our Python, frame by frame:
    methods call C++ that it does not know, and each piece between two such calls becomes a region of its own.
    """
    for base in cls.__mro__:
        for name, method in vars(base).items() if base.__module__.partition(".")[0] == "zerox" else ():
            if isinstance(method, FunctionType) and not name.startswith("_"):
                untraced(method)


def untraced(function: F) -> F:
    """The same of one function, which stays what it is. In a region that is compiled, it ends the graph."""
    _torch.end_graphs_at(function, "zerox runs it as it is")
    inner: Any = function
    while inner is not None:
        if inner.__globals__["__name__"].partition(".")[0] == "zerox":  # torch's wrappers share one code with all users
            keep_from_dynamo(inner)
        inner = getattr(inner, "__wrapped__", None)
    return function


def _mark(_: Any) -> None:
    pass


def _was_reset() -> bool:
    """Whether Dynamo was reset since the last call, for all we know: it then gives the names of regions again."""
    return _torch.note_start(_mark)


# Regions whose names say nothing wait for all parameters. The partial is no function that Dynamo could compile.
C.set_names_are_new(_was_reset if keep_from_dynamo(_was_reset) else functools.partial(bool, 1))
