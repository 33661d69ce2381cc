"""Lets pip's isolated build see the torch that is installed, and says which will do. Standard library only.

`pip install .` builds with the environment's own Python, but hides what is installed there behind a folder of build
tools. The extension has to be linked against the very torch that will load it, and a second one would be gigabytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

# What pip sets to hide the environment from its Python.
HIDING = ("PYTHONPATH", "PYTHONNOUSERSITE")
NO_TORCH = (
    "no torch to build against: run `pip install torch`, then the same command again "
    "(uv hides a torch that is installed: `uv pip install --no-build-isolation .`)"
)
# README has a table of what was tried. zerox relies on private names of torch, which the next release may lack.
LEAST_TORCH = (2, 11)
NEXT_TORCH = (2, 15)


def torch_requirement() -> str:
    """What pip is told. A newer torch does with ZEROX_ANY_TORCH=1."""
    least, following = (".".join(map(str, version)) for version in (LEAST_TORCH, NEXT_TORCH))
    return f"torch>={least}" + ("" if any_torch() else f",<{following}")


def any_torch() -> bool:
    return os.environ.get("ZEROX_ANY_TORCH") == "1"


def environment_path() -> list[str]:
    """sys.path of this Python as its user has it: with system or user packages where they count, and .pth files."""
    environment = {name: value for name, value in os.environ.items() if name not in HIDING}
    command = [sys.executable, "-c", "import json, sys; print(json.dumps([folder for folder in sys.path if folder]))"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def make_torch_visible() -> bool:
    """Appends to sys.path, so that the build tools that pip chose stay first. False where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        sys.path += [folder for folder in environment_path() if folder not in sys.path]
        importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None
