"""timm's scheduler takes an argument that newer versions name otherwise."""

from __future__ import annotations

from typing import Any

import clients.torchvision_ops  # noqa: F401

from timm.scheduler import cosine_lr  # isort: skip


class CosineLRScheduler(cosine_lr.CosineLRScheduler):
    def __init__(self, *args: Any, t_mul: float, **kwargs: Any) -> None:
        super().__init__(*args, cycle_mul=t_mul, **kwargs)


cosine_lr.CosineLRScheduler = CosineLRScheduler
