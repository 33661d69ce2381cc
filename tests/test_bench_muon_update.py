"""bench.muon_update: Muon's update beside its products and beside others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import muon_update
from bench.jobs import WrongResult
from bench.muon_update import ADAM, ONE_BY_ONE, OURS, PRODUCTS, TORCH
from tests.kernels.shards import same_bits
from zerox import FusedShardedMuon
from zerox.update.newton_schulz import Iteration, orthogonalize

CPU = torch.device("cpu")
IN_AN_ITERATION = 3
ITERATIONS = 5


def test_each_is_timed_with_the_work_that_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    muon_update.main(["--device=cpu", "--model=tiny", "--seconds=0.1", f"--json={file}"])
    result = json.loads(file.read_text())
    rows = {row["who"]: row for row in result["rows"]}
    assert list(rows) == [OURS, PRODUCTS, ONE_BY_ONE, TORCH, ADAM]
    assert result["skipped"] == []
    layers, width = muon_update.MODELS["tiny"]
    operations = layers * 5 * sum(4 * width**2 * n + 2 * width**3 for n in (3 * width, width, 4 * width, 4 * width))
    for who, row in rows.items():
        assert (row["matrices"], row["samples"]) == (4 * layers, 5)
        assert 0 < row["host_ms"] <= row["p50_ms"]
        assert row["of_products"] > 0
        assert who == ADAM or row["tflops"] == pytest.approx(operations / row["p50_ms"] / 1e9)
    of_each_shape = 4 * ITERATIONS * IN_AN_ITERATION
    assert rows[PRODUCTS]["products"] == of_each_shape
    assert {rows[who]["products"] for who in (OURS, ONE_BY_ONE, TORCH)} == {layers * of_each_shape}, "as on any CPU"
    assert rows[ADAM]["products"] == 0
    assert rows[OURS]["apart"] == 0, "on a CPU"
    assert "of_products" in capsys.readouterr().out


def test_ratios_are_taken_round_by_round() -> None:
    took = {OURS: [2.0, 6.0, 9.0], PRODUCTS: [1.0, 2.0, 4.0], TORCH: [6.0, 6.0, 6.0]}
    samples = {who: [(ms, ms / 2) for ms in each] for who, each in took.items()}
    ours, products, theirs = muon_update.rows_of("tiny", samples, {who: {} for who in took})
    assert (ours["of_products"], products["of_products"], theirs["of_products"]) == (2.25, 1.0, 3.0)
    assert (ours["theirs_over_ours"], theirs["theirs_over_ours"]) == (None, 1.0)
    assert (ours["p50_ms"], ours["host_ms"]) == (6.0, 3.0)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)])
def test_the_products_are_those_of_the_update(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    by = Iteration((muon_update.A, muon_update.B, muon_update.C), muon_update.STEPS, 1e-7)
    [update] = orthogonalize([matrix.clone()], by)
    assert same_bits(muon_update.iterate(matrix / matrix.norm()), update)
    [of_batch] = muon_update.iterate((matrix / matrix.norm())[None])
    torch.testing.assert_close(of_batch, update, rtol=0, atol=0.03)


def test_an_update_that_is_not_torchs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_update, "FusedShardedMuon", partial(FusedShardedMuon, ns_steps=4))
    with pytest.raises(WrongResult, match=r"a step of zerox is 0\.\d+ of the update away from torch"):
        muon_update.measure("tiny", CPU, 0.0)


def test_a_model_that_does_not_fit_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(model: str, *_: object) -> list[muon_update.Row]:
        if model != "tiny":
            raise torch.OutOfMemoryError
        samples = {OURS: [(1.0, 1.0)] * 5, PRODUCTS: [(1.0, 1.0)] * 5}
        more = {"products": 0, "launches": None, "extra_mib": None}
        return muon_update.rows_of(model, samples, dict.fromkeys(samples, more))

    monkeypatch.setattr(muon_update, "measure", measure)
    file = tmp_path / "x.json"
    muon_update.main(["--device=cpu", "--model", "gpt2-xl", "tiny", f"--json={file}"])
    result = json.loads(file.read_text())
    assert result["skipped"] == ["gpt2-xl: too little memory"]
    assert [row["who"] for row in result["rows"]] == [OURS, PRODUCTS]
    assert "skipped gpt2-xl" in capsys.readouterr().out


def test_models_have_the_matrices_of_gpt_2_and_its_xl() -> None:
    numel = {name: sum(m * n for m, n in muon_update.shapes_of(name)) for name in muon_update.MODELS}
    assert (len(muon_update.shapes_of("gpt2")), numel["gpt2"]) == (48, 84_934_656)
    assert (len(muon_update.shapes_of("gpt2-xl")), numel["gpt2-xl"]) == (192, 1_474_560_000)
