"""What save(), load() and their kin were given, before ranks synchronize: each mistake is one line with the way out."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerox.engine import Engine


def check_arguments(call: str, path: Any, model: Any, optimizer: Any) -> None:
    """TypeError for anything but a path, a model and an optimizer of zerox. ``call``: "zerox.save()", for the text."""
    order = f"{call} takes (path, model, optimizer)"
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{order}, and path is {a_kind_of(path)}: pass the checkpoint's folder as a string or a Path")
    if isinstance(model, Engine) and isinstance(optimizer, nn.Module):
        raise TypeError(f"{order}, and got (path, optimizer, model): swap the last two")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{order}, and model is {a_kind_of(model)}: pass the torch.nn.Module whose parameters are trained"
        )
    if not isinstance(optimizer, Engine):
        raise TypeError(
            f"{order}, and optimizer is {a_kind_of(optimizer)}, which is no optimizer of zerox: {way_out_of(optimizer)}"
        )


def check_weights_arguments(call: str, optimizer: Any, path: Any) -> None:
    """TypeError for anything but an optimizer of zerox and a path. ``call``: "zerox.save_weights()", for the text."""
    order = f"{call} takes (optimizer, path)"
    if isinstance(optimizer, str | os.PathLike) and isinstance(path, Engine):
        raise TypeError(f"{order}, and got (path, optimizer): swap the two")
    if isinstance(optimizer, nn.Module):
        raise TypeError(f"{order}, and optimizer is {a_kind_of(optimizer)}: pass the optimizer that trains this model")
    if not isinstance(optimizer, Engine):
        raise TypeError(
            f"{order}, and optimizer is {a_kind_of(optimizer)}, which is no optimizer of zerox: {way_out_of(optimizer)}"
        )
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{order}, and path is {a_kind_of(path)}: pass a string or a Path")


def way_out_of(given: Any) -> str:
    inner = getattr(given, "optimizer", None)
    if isinstance(inner, Engine):
        return f"pass the {type(inner).__name__} that it wraps, its .optimizer"
    if isinstance(given, Optimizer):
        return "build a FusedShardedAdam or another of zerox's, or save and load its state_dict() as with torch"
    return "pass the FusedShardedAdam, or another of zerox's, that trains the model"


def a_kind_of(given: Any) -> str:
    return "None" if given is None else f"of the class {type(given).__module__}.{type(given).__qualname__}"
