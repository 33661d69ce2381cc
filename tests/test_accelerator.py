"""Tests on the fake accelerator: the order of streams, and the kernels' GPU tests, csrc/cuda compiled for the host.

To run them directly: ZEROX_TEST_DEVICE=fake python -m pytest tests/accelerator tests/gpu/test_kernel_update.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/accelerator/test_*.py")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/gpu/test_kernel_*.py")),
]


@pytest.mark.parametrize("file", FILES)
def test_passes_on_the_fake_accelerator(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", file]
    environment = {**os.environ, "ZEROX_TEST_DEVICE": "fake"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"^[1-9]\d* passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), (
        "none ran, or some were skipped"
    )
    print(done.stdout.strip().rpartition("\n")[2])


def test_there_is_something_to_run() -> None:
    assert len(FILES) == 8, FILES
