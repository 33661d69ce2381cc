"""bench.rank_0_save: what one rank's save of the whole state costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import rank_0_save


def test_it_times_a_save_beside_one_of_whole_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    rank_0_save.main(["--ranks=2", "--mib=32", "--rounds=1", f"--folder={tmp_path}", f"--json={file}"])
    rows = json.loads(file.read_text())["rows"]
    assert [row["what"] for row in rows] == ["state_dict()", "whole already", "plain read", "into new pages"]
    assert rows[0]["missing_mib"] == pytest.approx(32), "half of two moments"
    taken = {row["what"]: row["seconds"] for row in rows}
    assert rows[0]["over"] == pytest.approx((taken["state_dict()"] - taken["whole already"]) / taken["plain read"])
    longer = taken["state_dict()"] - taken["whole already"]
    assert rows[0]["over_new"] == pytest.approx(longer / taken["into new pages"])
    assert "plain read" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"], "nothing is left behind"
