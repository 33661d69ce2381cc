"""What this machine lacks: a font from the network, and torchvision's choice among boxes that overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clients.torchvision_ops import torchvision


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The indices of boxes that overlap none of a higher score by more than ``iou_threshold``, the highest first."""
    overlaps = torchvision.ops.box_iou(boxes, boxes)
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not kept or overlaps[index, kept].max() <= iou_threshold:
            kept.append(index)
    return torch.as_tensor(kept, dtype=torch.int64)


def _fetch_nothing(*_: Any, **__: Any) -> None:
    pass


torchvision.ops.nms = nms
torch.hub.download_url_to_file = _fetch_nothing
