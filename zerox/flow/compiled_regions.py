"""Dynamo, and the functions that it compiles."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from zerox import _C as C

F = TypeVar("F", bound=Callable[..., Any])


def run_eagerly(function: Callable[..., Any]) -> None:
    """Keeps Dynamo from compiling a function by itself, as it does a compiled module's hook.

    As torch.compiler.disable, which takes a second to import, and whose result can't be pickled.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, skip)


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
    attributes: Any = function
    attributes._torchdynamo_disable = True
    attributes._torchdynamo_disable_msg = "zerox runs it as it is"
    inner: Any = function
    while inner is not None:
        if inner.__globals__["__name__"].partition(".")[0] == "zerox":  # torch's wrappers share one code with all users
            run_eagerly(inner)
        inner = getattr(inner, "__wrapped__", None)
    return function


def _mark(_: Any) -> None:
    pass


def _begun_anew() -> bool:
    """Whether Dynamo was reset since the last call: it then gives the names of regions again."""
    from torch._dynamo.callback import callback_handler

    if _mark in callback_handler.start_callbacks:
        return False
    callback_handler.register_start_callback(_mark)
    return True


run_eagerly(_begun_anew)
C.set_names_are_new(_begun_anew)
