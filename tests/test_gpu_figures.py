"""The parts of scripts/gpu.py that measure, run on the CPU with small models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import gpu
import gpu_figures
import gpu_report as report
import gpu_run


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (gpu_figures, gpu_run):
        monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    return tmp_path


@pytest.mark.parametrize("name", list(gpu_figures.FIGURES))
def test_figures_are_what_the_benchmarks_say(monkeypatch: pytest.MonkeyPatch, logs: Path, name: str) -> None:
    monkeypatch.setattr(gpu_figures, "DEVICE", "cpu")
    figure = replace(gpu_figures.FIGURES[name], timed=gpu_figures.FIGURES[name].timed and 0.01)
    part = gpu.measure(figure, gpu.Machine({}, quick=True, files=logs / "now"), 120.0)
    assert part["outcome"] == report.PASSED, part["tail"]
    assert part["command"].startswith(f"python -m {gpu_figures.FIGURES[name].module} --device=cpu")
    assert len(part["rows"]) > 0
    assert len(part["said"]) > 2
    picture = logs / part["picture"]
    assert picture.name.startswith("now-")
    assert picture.stat().st_size > 5_000


def test_a_benchmark_that_fails_shows_how_it_ended(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    monkeypatch.setattr(gpu_figures, "DEVICE", "abacus")
    part = gpu_figures.FIGURES["exposed"].run(True, 60.0, logs / "x.png")
    assert part["outcome"] == report.FAILED
    assert "invalid choice: 'abacus'" in part["tail"]
    assert "picture" not in part
