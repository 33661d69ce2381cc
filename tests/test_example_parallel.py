"""examples/train_parallel.py: what it prints, and its one-line refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.example import ENVIRONMENT

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_parallel.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, timeout=120)


@pytest.mark.parametrize("axes", ["--tp 2 --pp 2", "--replicate 2 --shard 2", "--experts 2 --shard 2"])
def test_it_prints_how_far_its_training_is_from_one_process(axes: str) -> None:
    ended = run(*axes.split(), "--steps", "5")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("4 ranks (")
    rows = dict(re.findall(r"^(.*\w) +([\d.,e+-]+)$", ended.stdout, re.M))
    assert float(rows["farthest parameter from one process with AdamW"]) < 2e-5
    assert float(rows["farthest gradient norm, relative"]) < 1e-6


WRONG = {
    "--pp 3": "--pp 3: the model has 2 blocks to divide",
    "--experts 3": "--experts 3: each block has 4 experts to share out evenly",
    "--experts 2 --tp 2": "--experts does not go with --tp: zerox refuses it, see docs/meshes.md",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_option_is_one_line(arguments: str) -> None:
    ended = run(*arguments.split())
    assert ended.returncode == 2
    assert ended.stderr == f"train_parallel.py: error: {WRONG[arguments]}\n"
