"""torch's accelerator is there, and torchvision can be imported."""

from __future__ import annotations

import os

import torch

import clients.torchvision_ops  # noqa: F401

torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.accelerator.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
