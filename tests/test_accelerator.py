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

pytestmark = pytest.mark.deep
ROOT = Path(__file__).parents[1]
FILES = [
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/accelerator/test_*.py")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/gpu/test_kernel_*.py")),
]


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """One process for all files: it takes seconds to start."""
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "--no-header", *FILES]
    environment = {**os.environ, "ZEROX_TEST_DEVICE": "fake"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("file", FILES)
def test_passes_on_the_fake_accelerator(file: str, ended: subprocess.CompletedProcess[str]) -> None:
    outcomes = re.findall(rf"^{re.escape(file)}::.* ([A-Z]+) +\[ *\d+%\]$", ended.stdout, re.MULTILINE)
    assert outcomes, f"none ran: {shortened(ended)}"
    assert set(outcomes) == {"PASSED"}, f"some failed or were skipped: {shortened(ended)}"


def test_nothing_else_went_wrong(ended: subprocess.CompletedProcess[str]) -> None:
    """As an error between two tests, or a crash at exit."""
    last = ended.stdout.strip().rpartition("\n")[2]
    assert ended.returncode == 0, shortened(ended)
    assert re.search(r"^=+ [1-9]\d* passed(, \d+ warnings?)? in", last), last
    print(last)


def shortened(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stdout[-8000:] + ended.stderr[-2000:]


def test_there_is_something_to_run() -> None:
    assert len(FILES) == 17, FILES
