"""bench.larger: what a model that is larger than a rank takes there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import larger


@pytest.mark.parametrize("trains", [False, True])
def test_it_stays_within_its_bounds(tmp_path: Path, trains: bool) -> None:
    if trains and not larger.can_limit():
        pytest.skip("no memory cgroup can be made here")
    file = tmp_path / "x.json"
    options = ["--mib=128", "--resident-mib=64", "--steps=2", f"--folder={tmp_path / 'in'}", f"--json={file}"]
    larger.main(["--ranks=2", *options, *(["--allowed-mib=512"] if trains else [])])
    rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["built"]["mib"] == 128
    assert rows["built"]["bound_mib"] == pytest.approx((64 + 64 + 16) * 1.02)
    assert 64 < rows["built"]["peak_mib"] < rows["built"]["bound_mib"] + 24, "what processes have once counts too"
    assert ("trained, 2 steps" in rows) is trains
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"], "nothing is left behind"
