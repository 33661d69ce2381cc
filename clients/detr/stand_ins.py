"""Pictures an eighth as large, and weights of the backbone that rank 0 draws where the script downloads them."""

from __future__ import annotations

import functools
from typing import Any

import torch

import clients.torchvision_ops  # noqa: F401

import torchvision  # isort: skip
from datasets import transforms  # isort: skip  (the script's)

SMALLER = 8


def _drawn(*_: Any, **__: Any) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return torchvision.models.resnet18().state_dict()


def _divide_sizes(cls: type) -> None:
    init = cls.__init__

    @functools.wraps(init)
    def wrapped(self: Any, *sizes: Any, max_size: int | None = None) -> None:
        small = [[each // SMALLER for each in size] if isinstance(size, list) else size // SMALLER for size in sizes]
        init(self, *small, **({"max_size": max_size // SMALLER} if max_size else {}))

    cls.__init__ = wrapped


torchvision.models.ResNet18_Weights.get_state_dict = _drawn

for each in (transforms.RandomResize, transforms.RandomSizeCrop):
    _divide_sizes(each)
