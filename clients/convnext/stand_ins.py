"""What timm and torch had when the script was written, a log that is not written, and a smaller model."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

import clients.torchvision_ops  # noqa: F401  (for timm)
from clients.old_names import put

# isort: split
import timm.models
import timm.optim


def create_model(_: str, pretrained: bool, **options: Any) -> nn.Module:
    """timm's own hands over arguments that the script's models don't know."""
    models = importlib.import_module("models.convnext")
    assert not pretrained
    return models.ConvNeXt(depths=[1, 1, 4, 1], dims=[8, 16, 24, 32], **options)


timm.models.create_model = create_model
put("torch._six", inf=torch.inf)
put("tensorboardX", SummaryWriter=None)
put("timm.optim.nadam", Nadam=None)
put("timm.optim.novograd", NovoGrad=None)
put("timm.optim.radam", RAdam=None)
