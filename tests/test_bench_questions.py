"""bench.questions: what it costs that ranks ask each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import questions


def test_it_measures_constructors_that_ask_and_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    questions.main(["--ranks", "2", "--models", "tiny", "--rounds=2", f"--json={file}"])
    rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == set(questions.WAYS)
    assert rows["asked"]["sockets"] > rows["not asked"]["sockets"]
    assert rows["asked"]["threads"] > rows["not asked"]["threads"]
    assert "512 ranks: 511 sockets a rank more" in capsys.readouterr().out
