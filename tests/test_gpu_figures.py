"""The parts of scripts/gpu.py that measure, run on the CPU with small models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import gpu
import gpu_report as report
import gpu_run

pytestmark = pytest.mark.deep


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(gpu_run, "LOGS", tmp_path / "logs")
    return tmp_path


@pytest.mark.parametrize("name", list(gpu.FIGURES))
def test_figures_are_what_the_benchmarks_say(monkeypatch: pytest.MonkeyPatch, logs: Path, name: str) -> None:
    figure = gpu.FIGURES[name]
    if name == "kernels":  # tests/test_bench.py runs all of them
        figure = replace(figure, quick=f"{figure.quick} --only=norm")
    monkeypatch.setitem(gpu.FIGURES, name, replace(figure, timed=figure.timed and 0.01))
    part = gpu.measure(name, gpu.Machine({}, quick=True, files=logs / "now", device="cpu"), 120.0)
    assert part["outcome"] == report.PASSED, part["tail"]
    assert part["command"].startswith(f"python -m {figure.command}")
    assert "--device=cpu" in part["command"]
    assert len(part["rows"]) > 0
    assert len(part["said"]) > 2
    assert ("picture" in part) == figure.drawn
    if figure.drawn:
        picture = logs / part["picture"]
        assert picture.name.startswith("now-")
        assert picture.stat().st_size > 5_000


def test_a_benchmark_that_fails_shows_how_it_ended(logs: Path) -> None:
    part = gpu.measure("exposed", gpu.Machine({}, quick=True, files=logs / "x", device="abacus"), 60.0)
    assert part["outcome"] == report.FAILED
    assert "invalid choice: 'abacus'" in part["tail"]
    assert "picture" not in part
