"""bench.load_weights: what loading weights costs, once what was loaded is what the files have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import load_weights
from bench.jobs import WrongResult
from bench.systems import Training


def test_it_weighs_and_times_loading_beside_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    load_weights.main(["--layers=1", "--rounds=1", "--dtype=bf16", f"--folder={tmp_path}", f"--json={file}"])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["stage"], row["what"]) for row in rows] == [
        (stage, what) for stage in (2, 3) for what in ("load", "load, converted")
    ]
    said = capsys.readouterr().out
    for row in rows:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["read_seconds"])
        assert 0.99 < row["read"] <= 1, "each byte is read once"
        assert row["tensor_mib"] < 0.2 * row["mib"], "pieces, and what is on its way"
        assert row["what"] in said
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"], "nothing is left behind"


def test_a_wrong_load_is_not_timed() -> None:
    model = Training(layers=1, width=64, vocabulary=100).model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(load_weights.value_of(name, param, torch.bfloat16))
        load_weights.check(model, torch.bfloat16)
        model.get_parameter("token_embedding.weight").view(-1)[3] += 1
    with pytest.raises(WrongResult, match=r"token_embedding[.]weight is not what the file has"):
        load_weights.check(model, torch.bfloat16)
