"""Import this before torchvision, which fails without its operators if it was built for another torch.

The operators that its import asks for are declared here then, without an implementation.
"""

from __future__ import annotations

import torch

_kept = None
try:
    import torchvision
except RuntimeError:
    _kept = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _kept.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
