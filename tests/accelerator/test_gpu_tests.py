"""The GPU tests of the kernels on the fake accelerator: csrc/cuda as it is, tables, checks and launches included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.fake import machine

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kernel", ["adam", "flatten", "norm", "reduce"])
def test_kernels_pass_their_gpu_tests(kernel: str) -> None:
    machine()  # built once, here
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", f"tests/gpu/test_kernel_{kernel}.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "ZEROX_TEST_DEVICE": "fake"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"^[1-9]\d* passed in", done.stdout, re.MULTILINE), "none was run, or some were skipped"
