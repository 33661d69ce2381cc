"""examples/train_vision.py: its table and picture, and its one-line refusals."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.example import assert_refused_in_one_line, run_script

EXAMPLE = "train_vision.py"
ROOT = Path(__file__).parents[1]
SMALLEST = ("--batch", "8", "--width", "8", "--blocks", "1")


def test_both_systems_learn_the_same(tmp_path: Path) -> None:
    picture = tmp_path / "vision.png"
    draws = ["--picture", str(picture)] if importlib.util.find_spec("matplotlib") else []
    ended = run_script(EXAMPLE, "--steps", "80", *SMALLEST, *draws)  # under torchrun
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("2 ranks, 80 steps of 8 digits a rank")
    rows = re.findall(r"^(zerox|DDP \+ AdamW) +([\d.]+) +([\d.]+)% +([\d.]+) +([\d,]+)$", ended.stdout, re.M)
    assert [name for name, *_ in rows] == ["zerox", "DDP + AdamW"]
    (_, _, accuracy, loss, nbytes), (_, _, others_accuracy, others_loss, others_nbytes) = rows
    assert float(accuracy) > 30, "ten kinds: it learns"
    assert float(accuracy) == pytest.approx(float(others_accuracy), abs=1)
    assert float(loss) == pytest.approx(float(others_loss), abs=0.02)
    assert int(nbytes.replace(",", "")) < 0.6 * int(others_nbytes.replace(",", ""))
    [(before, after)] = re.findall(r"up to (\S+) apart on the ranks, (\S+) after broadcast_buffers", ended.stdout)
    assert float(before) > 0
    assert float(after) == 0
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_option_is_one_line() -> None:
    assert_refused_in_one_line(EXAMPLE, "--steps 3", "--steps 3: at least 10 are needed, the first ones warm up")


def test_without_scikit_learn_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['sklearn'] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(ROOT / "examples" / EXAMPLE)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    reason = "the digits are scikit-learn's, which is not installed (pip install scikit-learn)"
    assert ended.stderr == f"{EXAMPLE}: error: {reason}\n"
