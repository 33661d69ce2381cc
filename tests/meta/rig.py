"""Models that are built on the meta device, beside twins that the same functions initialise as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from zerox import FusedShardedAdam

SEED = 11
CAP = 0.02  # MiB: every model has several buckets
Make = Callable[[], nn.Module]


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def reset(module: nn.Module) -> None:
    """What ``init=None`` does of one module."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    way = getattr(module, "reset_parameters", None)
    if isinstance(module, nn.MultiheadAttention | nn.Transformer):
        way = module._reset_parameters
    if way is not None and (own or isinstance(module, nn.Transformer)):
        way()


def twin(make: Make, init: Callable[[nn.Module], Any] = reset, seed: int = SEED) -> nn.Module:
    """The whole model in one process. ``make`` ties what is tied again: to_empty() gives each its own memory."""
    model = on_meta(make).to_empty(device="cpu")
    if hasattr(model, "tie"):
        model.tie()
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.apply(init)


def born(make: Make, rank: int, stage: int = 3, **options: Any) -> tuple[nn.Module, FusedShardedAdam]:
    """On rank 0 with the twin's seed."""
    model = on_meta(make)
    torch.manual_seed(SEED + rank)
    given = {"bucket_cap_mb": CAP, "lr": 1e-2, **options}
    return model, FusedShardedAdam(model.named_parameters(), stage=stage, model=model, **given)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    of_model = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in of_model}


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of parameters and buffers that have other bits."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not same_bits(ours[name], theirs[name])]
