"""What the script takes from old versions of timm, torch and numpy, and a model small enough for a test."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from torch import nn

import clients.torchvision_ops  # noqa: F401
from clients.old_names import put

import timm  # isort: skip  (imports torchvision)
import timm.optim.optim_factory
from timm.models import vision_transformer


class Block(vision_transformer.Block):
    def __init__(self, *args: Any, qk_scale: None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return timm.optim.param_groups_weight_decay(model, weight_decay)


timm.__version__ = "0.3.2"
timm.optim.optim_factory.add_weight_decay = groups
vision_transformer.Block = Block
np.float = float
put("torch._six", inf=math.inf)

import models_mae  # noqa: E402  (needs the above)

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
DECODER = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
models_mae.tiny = partial(models_mae.MaskedAutoencoderViT, **SIZES, **DECODER)
