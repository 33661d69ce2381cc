"""Models on the meta device under frameworks, which move a model before they ask for its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerox.engine import Engine


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter is."""
    return any(param.is_meta for param in model.parameters())


def move_rest(model: nn.Module, device: torch.device) -> None:
    """Moves what is in memory. The optimizer gives the rest memory on this device."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    model._apply(moved)


def given_model(model: nn.Module) -> dict[str, Any]:
    """What an optimizer of zerox is given so that it makes ``model``."""
    return {"model": model} if is_on_meta(model) else {}


class Maker(type):
    """Of classes that make one optimizer, of ``kind`` for ``model``, which they let go of then."""

    kind: Any
    model: nn.Module

    def __call__(cls, groups: Any, **options: Any) -> Any:
        model = cls.model
        del cls.model
        frozen = [param for param in model.parameters() if param.is_meta and not param.requires_grad]
        more = [{"params": frozen, "weight_decay": 0.0}] if frozen else []
        return cls.kind([*groups, *more], model=model, **options)


def class_for(kind: type[Engine], model: nn.Module) -> Maker:
    """A class in place of ``kind``, for a framework that calls it with groups of what is trained and keeps a ``model=``
    for itself. The optimizer gets what is frozen in a group of its own."""
    return Maker(kind.__name__, (kind,), {"kind": kind, "model": model})


def check_made(model: nn.Module, call: str) -> None:
    """ValueError, before a model that no optimizer has made is moved. ``call``: how the framework gets both."""
    if is_on_meta(model):
        raise ValueError(
            f"zerox: {type(model).__name__} is on the meta device, and its optimizer gives it memory: first build "
            f"zerox.FusedShardedAdam(model.named_parameters(), model=model), then {call}"
        )
