"""bench.deaths: every place, stage and number of ranks has its row; a rank without an error fails the run.

The kills themselves are those of tests/bucket_manager/test_dead_ranks.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import deaths


def test_each_place_and_stage_is_killed_at_and_each_rank_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[tuple[int, int, str, int]] = []

    def kill_one(ranks: int, stage: int, place: str, victim: int, *_: Any) -> list[tuple[float, str]]:
        killed.append((ranks, stage, place, victim))
        return [(0.1, "an error"), (0.1 * ranks, "the last error")]

    monkeypatch.setattr(deaths, "kill_one", kill_one)
    path = tmp_path / "x.json"
    assert deaths.main(["--ranks", "3", "4", "--kills", "50", f"--json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    cases = {(ranks, place, stage) for ranks in (3, 4) for place in deaths.PLACES for stage in (1, 2)}
    assert {(row["ranks"], row["place"], row["stage"]) for row in rows} == cases
    assert len(rows) == len(cases)
    assert sum(row["kills"] for row in rows) == len(killed) == 100
    assert {(ranks, victim) for ranks, _, _, victim in killed} == {(n, rank) for n in (3, 4) for rank in range(n)}
    for row in rows:  # the last rank's error counts
        assert row["worst_s"] == pytest.approx(0.1 * row["ranks"])
    assert "after 0.40 s at most" in capsys.readouterr().out


def test_a_rank_that_has_no_error_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_one(*_: Any) -> list[tuple[float, str]]:
        raise deaths.NoError("3 ranks, stage 1, rank 0 killed in forward: rank 2 had no error within 120 s")

    monkeypatch.setattr(deaths, "kill_one", kill_one)
    assert deaths.main(["--ranks", "3"]) == 1
    assert "rank 2 had no error" in capsys.readouterr().err
