"""bench.momentum: Muon's momentum in few bits beside one in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import momentum
from zerox.plan.form import BLOCK_NUMEL

PAGE = Path(__file__).parents[1] / "docs/muon.md"
RESULTS = momentum.ROOT / "bench/results/muon-momentum.json"


def test_the_linear_map_is_off_by_half_a_step_at_most() -> None:
    values = torch.randn(3 * BLOCK_NUMEL + 5)
    values[BLOCK_NUMEL : 2 * BLOCK_NUMEL] = 0.0
    rounded = momentum.linear(values)
    for block, found in zip(values.split(BLOCK_NUMEL), rounded.split(BLOCK_NUMEL), strict=True):
        step = float(block.abs().max()) / momentum.MOST
        assert float((block - found).abs().max()) <= step / 2 * (1 + 1e-4)
        assert len(found.unique()) <= 2 * momentum.MOST + 1
        assert found[block.abs().argmax()] == block[block.abs().argmax()]
    assert torch.equal(momentum.linear(rounded), rounded)


def test_each_kind_is_trained_by_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(kind: str, seed: int, steps: int) -> tuple[float, float, float]:
        assert steps == 100
        return 2.0 + 0.1 * seed + 0.042 * (kind == momentum.LINEAR), 0.01, 0.1 * (seed + 1)

    monkeypatch.setattr(momentum, "train", train)
    file = tmp_path / "x.json"
    momentum.main(["--steps=100", "--seeds=2", f"--json={file}"])
    assert [row["kind"] for row in json.loads(file.read_text())["rows"]] == list(momentum.KINDS)
    said = capsys.readouterr().out
    assert "| fp32 | 2.0500 | 0.1000 | +0.00% | 1.00% | 15.00% |" in said
    assert "| 8bit linear | 2.0920 | 0.1000 | +2.05% | 1.00% | 15.00% |" in said


@pytest.mark.parametrize("kind", ["fp32", momentum.LINEAR])
def test_the_example_runs_with_each_momentum(kind: str) -> None:
    assert momentum.command(kind, 0, 3)[-1] == kind.removesuffix(" linear")
    loss, of_momentum, of_direction = momentum.train(kind, 0, 3)
    assert 3.0 < loss < 6.0
    if kind == "fp32":
        assert of_momentum == of_direction == 0.0
    else:
        assert 0.0 < of_momentum < of_direction < 0.5


def test_the_page_has_the_newest_table() -> None:
    found = json.loads(RESULTS.read_text())
    assert momentum.table(found["rows"]) in PAGE.read_text()
