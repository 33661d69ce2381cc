"""bench.muon: Muon beside AdamW, each with the best of its learning rates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import muon
from tests.example import run_script

PAGE = Path(__file__).parents[1] / "docs/muon.md"
RESULTS = muon.ROOT / "bench/results/muon-beside-adamw.json"


def test_adamw_gets_as_many_tries_and_as_much_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[muon.Run] = []

    def train(run: muon.Run) -> tuple[float, float]:
        runs.append(run)
        best = muon.RATES[run.optimizer][2]
        step_s = 0.03 if run.optimizer == "muon" else 0.01
        return 2.0 + 0.1 * run.seed * (run.seed < 3) + abs(run.lr - best), 5.0 + step_s * run.steps

    monkeypatch.setattr(muon, "train", train)
    file = tmp_path / "x.json"
    muon.main(["--steps=100", "--seeds=2", f"--json={file}"])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["optimizer"], row["steps"]) for row in rows] == [("muon", 100), ("adamw", 100), ("adamw", 300)]
    for row in rows:
        assert row["lr"] == muon.RATES[row["optimizer"]][2]
        assert row["losses"] == [2.0, 2.1]
        tries = [run for run in runs if run.steps == row["steps"] and run.optimizer == row["optimizer"]]
        assert [run.seed for run in tries] == [muon.TUNING_SEED] * 4 + [0, 1]
        assert row["step_ms"] == pytest.approx(30.0 if row["optimizer"] == "muon" else 10.0)
    assert "| Muon | 100 | 0.04 | 2.0500 | 0.1000 | 3 s |" in capsys.readouterr().out


def test_its_command_is_one_that_the_example_takes() -> None:
    script, *options = muon.command(muon.Run("muon", 0.02, 2, 1))[1:]
    ended = run_script(Path(script).name, *options)
    assert ended.returncode == 0, ended.stderr
    assert "held-out loss" in ended.stdout
    assert muon.command(muon.Run("muon", 0.02, 2, 1))[0] == sys.executable


def test_the_page_has_the_newest_table() -> None:
    assert muon.table(json.loads(RESULTS.read_text())["rows"]) in PAGE.read_text()
