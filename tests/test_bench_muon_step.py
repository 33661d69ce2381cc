"""bench.muon_step: a step of Muon beside the sum of what it is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import muon_step


def test_it_times_a_step_beside_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    muon_step.main(["--layers=1", "--width=64", "--rounds=1", "--ranks", "1", "2", f"--json={file}"])
    rows = json.loads(file.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["muon_seconds"] / (row["adam_seconds"] + row["alone_seconds"]))
        assert row["alone_seconds"] > 0
    assert rows[0]["balance"] == 1
    assert rows[1]["balance"] > 1, "four matrices of a layer, two of them larger"
    assert "balance" in capsys.readouterr().out
