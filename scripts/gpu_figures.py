"""The parts of gpu.py that measure: each a benchmark in a process of its own, with its numbers, output and picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import gpu_report as report
from gpu_report import Part
from gpu_run import LOGS, python, run, tail

DEVICE = "cuda"


@dataclass(frozen=True)
class Figure:
    """``timed``: the share of the time limit that goes into timing; the rest is for random data, checks and first
    calls. None: the benchmark takes as long as it takes."""

    module: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    timed: float | None = None

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def run(self, quick: bool, limit_s: float, picture: Path) -> Part:
        """``picture`` is drawn where matplotlib is installed."""
        file = LOGS / f"{self.name}.json"
        file.unlink(missing_ok=True)
        options = [*self.options, *(self.quick if quick else ()), f"--json={file}", f"--png={picture}"]
        if self.timed is not None:
            options.append(f"--seconds={self.timed * limit_s:.0f}")
        ended = run(python("-m", self.module, f"--device={DEVICE}", *options), self.name, limit_s)
        part: Part = {"outcome": ended.outcome, "said": ended.text.splitlines()}
        if picture.exists():
            part["picture"] = picture.name
        if ended.outcome != report.PASSED:
            part["tail"] = tail(ended.text)
        return {**(json.loads(file.read_text()) if file.exists() else {}), **part}


FIGURES = {
    "kernels": Figure("bench.kernels", timed=0.4),
    "step": Figure("bench.optimizer_step", timed=0.4),
    "exposed": Figure("bench.exposed", quick=("--layers=8", "--rounds=2")),
    "streams": Figure("bench.streams", ("--dtype=bf16", "--clip"), quick=("--layers=1", "--batch=1", "--dtype=fp32")),
}
