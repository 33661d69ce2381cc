"""bench.save_weights: what weights in files cost beside a plain write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import save_weights


@pytest.mark.parametrize("stage", [2, 3])
def test_it_times_weights_beside_a_plain_write(tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int) -> None:
    file = tmp_path / "x.json"
    options = ["--ranks=2", "--mib=48", "--rounds=1", f"--stage={stage}", f"--folder={tmp_path}", f"--json={file}"]
    save_weights.main(options)
    rows = json.loads(file.read_text())["rows"]
    assert [row["what"] for row in rows] == ["one file", "eight files", "other order", "plain write"]
    assert all(row["mib"] == 48 for row in rows)
    plain = rows[-1]["seconds"]
    assert [row["ratio"] for row in rows] == pytest.approx([row["seconds"] / plain for row in rows])
    assert "other order" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"], "nothing is left behind"
