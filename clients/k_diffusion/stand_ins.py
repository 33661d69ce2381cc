"""No checkpoint of a run before, from which the script would go on; no clip, which evaluations alone use; and schedules
with an argument that torch has dropped since.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

import clients.torchvision_ops  # noqa: F401

clip: Any = ModuleType("clip")
clip.available_models = list
sys.modules["clip"] = clip
Path("model_state.json").unlink(missing_ok=True)

begin = LRScheduler.__init__


def begin_verbose(self: Any, optimizer: Any, last_epoch: int = -1, verbose: object = None) -> None:
    begin(self, optimizer, last_epoch)


LRScheduler.__init__ = begin_verbose  # type: ignore[method-assign]
