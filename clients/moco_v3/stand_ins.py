"""The script wraps the model only where there is CUDA: it is told so, without what needs a GPU then.

A name of timm is where it was when the script was written, and the model is smaller than any that the script names.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

import clients.torchvision_ops  # noqa: F401  (for timm)

# isort: split
from timm.layers import to_2tuple
from timm.models import vision_transformer


class VisionTransformer(vision_transformer.VisionTransformer):
    num_tokens = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "embed_dim": 32, "depth": 2, "num_heads": 2})


def is_available() -> bool:
    """Of libraries' questions only the script's."""
    return sys._getframe(1).f_globals["__name__"] == "__main__"


helpers: Any = ModuleType("timm.models.layers.helpers")
helpers.to_2tuple = to_2tuple
sys.modules[helpers.__name__] = helpers
vision_transformer.VisionTransformer = VisionTransformer
torch.cuda.is_available = is_available
nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(lambda module: module)
