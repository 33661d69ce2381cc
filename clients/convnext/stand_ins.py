"""What timm and torch had when the script was written, a log that is not written, and a smaller model."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

import clients.torchvision_ops  # noqa: F401  (for timm)

# isort: split
import timm.models
import timm.optim


def create_model(_: str, pretrained: bool, **options: Any) -> nn.Module:
    """timm's own hands over arguments that the script's models don't know."""
    models = importlib.import_module("models.convnext")
    assert not pretrained
    return models.ConvNeXt(depths=[1, 1, 4, 1], dims=[8, 16, 24, 32], **options)


def _put(name: str, **content: Any) -> None:
    module = sys.modules.setdefault(name, ModuleType(name))
    for key, value in content.items():
        setattr(module, key, value)


timm.models.create_model = create_model
_put("torch._six", inf=torch.inf)
_put("tensorboardX", SummaryWriter=None)
_put("timm.optim.nadam", Nadam=None)
_put("timm.optim.novograd", NovoGrad=None)
_put("timm.optim.radam", RAdam=None)
