"""zerox itself imports no framework."""

from __future__ import annotations

import subprocess
import sys

FRAMEWORKS = (
    "accelerate",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "peft",
    "trl",
    "datasets",
    "torchmetrics",
    "tensorboard",
)
LOOK = f"""
import sys, importlib.util
import zerox, zerox.checkpoint, zerox.integrations
assert all(map(importlib.util.find_spec, {FRAMEWORKS!r})), "they are not installed here"
print(sorted({{name.partition(".")[0] for name in sys.modules}} & set({FRAMEWORKS!r})))
"""


def test_zerox_imports_no_framework() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
