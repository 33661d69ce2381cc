"""Ranks as programs of their own, each with an interpreter that ends as a user's does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_programs(source: str, folder: Path, *args: str, world_size: int = 2, within_s: float = 240) -> list[str]:
    """Runs ``source`` with the arguments RANK, STORE (a path for file://) and ``args``; returns each rank's output.

    AssertionError, with what a rank said, unless all end with exit code 0.
    """
    script = folder / "rank.py"
    script.write_text(source)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "store"), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    printed = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=within_s)
            assert rank.returncode == 0, errors
            printed.append(output)
    finally:
        for rank in ranks:
            rank.kill()
    return printed
