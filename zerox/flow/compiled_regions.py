"""Dynamo, and the functions that it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerox import _C as C


def run_eagerly(function: Callable[..., Any]) -> None:
    """Keeps Dynamo from compiling a function by itself, as it does a compiled module's hook.

    As torch.compiler.disable, which takes a second to import, and whose result can't be pickled.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, skip)


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
