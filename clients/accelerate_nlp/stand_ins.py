"""evaluate, whose metrics are downloads."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

from torch import Tensor

import clients.torchvision_ops  # noqa: F401  (for transformers)


class Accuracy:
    """It gives gloo's threads time to end. Where the script ends, torch's reducer waits for them and keeps the GIL, so
    one that still has a tensor to free would wait for ever: in about one of four runs of the unchanged script.
    """

    def __init__(self, *_: str) -> None:
        self.found: list[bool] = []

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        self.found += (predictions == references).tolist()

    def compute(self) -> dict[str, Any]:
        found, self.found = self.found, []
        time.sleep(0.1)
        return {"accuracy": sum(found) / len(found)}


evaluate: Any = ModuleType("evaluate")
evaluate.load = Accuracy
sys.modules["evaluate"] = evaluate
