"""bench.checkpoint: what saving and loading cost, once what was loaded is what was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import checkpoint
from bench.jobs import WrongResult
from bench.systems import Training


def test_it_weighs_and_times_saving_and_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    checkpoint.main(["--layers=1", "--rounds=1", "--dtype=bf16", f"--folder={tmp_path}", f"--json={file}"])
    rows = json.loads(file.read_text())["rows"]
    assert [row["what"] for row in rows] == ["save", "load", "load, converted"]
    said = capsys.readouterr().out
    for row in rows:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["disk_seconds"])
        assert row["tensor_mib"] <= row["bucket_mib"], "nothing needs more than a bucket"
        assert row["mib"] > 10
        assert row["what"] in said
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"], "nothing is left behind"


@pytest.mark.parametrize("what", ["a parameter", "a moment"])
def test_a_wrong_load_is_not_timed(what: str) -> None:
    training = Training(layers=1, width=64, vocabulary=100)
    ours, theirs = checkpoint.built(training, 0), checkpoint.built(training, 0)
    checkpoint.check(ours, theirs)
    param = next(iter(theirs[0].parameters()))
    assert isinstance(param, nn.Parameter)
    wrong: torch.Tensor = param.data if what == "a parameter" else theirs[1].state[param]["exp_avg"]
    wrong.view(-1)[3] += 1
    with pytest.raises(WrongResult, match="what was loaded is not what was saved"):
        checkpoint.check(ours, theirs)
