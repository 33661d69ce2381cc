"""The script wraps the model only where there is CUDA: it is told so, without what needs a GPU then.

A name of timm is where it was when the script was written, and the model is smaller than any that the script names.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import clients.torchvision_ops  # noqa: F401  (for timm)
from clients.old_names import claim_cuda, put

# isort: split
from timm.layers import to_2tuple
from timm.models import vision_transformer


class VisionTransformer(vision_transformer.VisionTransformer):
    num_tokens = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "embed_dim": 32, "depth": 2, "num_heads": 2})


put("timm.models.layers.helpers", to_2tuple=to_2tuple)
vision_transformer.VisionTransformer = VisionTransformer
claim_cuda(lambda asker: asker == "__main__")
nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(lambda module: module)
