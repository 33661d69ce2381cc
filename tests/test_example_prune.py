"""examples/prune_gpt.py: its table and picture, and its one-line refusals."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

from tests.example import assert_refused_in_one_line, run_script

EXAMPLE = "prune_gpt.py"
run = partial(run_script, EXAMPLE)
REACHED = {
    "dense": "0.0%",
    "50% by magnitude": "50.0%",
    "80% by magnitude": "80.0%",
    "2:4": "50.0%",
    "80% by RigL": "80.0%",
    "80%, DDP by hand": "80.0%",
}


def test_trainings_are_one_table_and_one_picture(tmp_path: Path) -> None:
    picture = tmp_path / "prune.png"
    draws = ["--picture", str(picture)] if importlib.util.find_spec("matplotlib") else []
    ended = run("--steps", "20", "--windows", "2", *draws, ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("2 ranks, 20 steps, model tiny")
    rows = re.findall(r"^(.+?) +([\d.]+%) +([\d.]+) +([\d.]+) +([\d,]+) +([\d.]+)$", ended.stdout, re.M)
    assert {name: sparsity for name, sparsity, *_ in rows} == REACHED
    loss = {name: float(loss) for name, _, loss, *_ in rows}
    assert loss["80% by magnitude"] == pytest.approx(loss["80%, DDP by hand"], abs=1e-3)
    assert loss["dense"] != loss["50% by magnitude"] != loss["80% by magnitude"] != loss["80% by RigL"]
    state = {name: int(nbytes.replace(",", "")) for name, _, _, _, nbytes, _ in rows}
    assert state["dense"] < state["2:4"] < 1.03 * state["dense"], "a bit an element, beside two moments of 32"
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


WRONG = {
    "--steps 3": "--steps 3: masks come in over at least 10",
    "--ranks 0": "--ranks must be at least 1",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_option_is_one_line(arguments: str) -> None:
    assert_refused_in_one_line(EXAMPLE, arguments, WRONG[arguments])
