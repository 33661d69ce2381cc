"""The tables of speed and memory in README.md and docs/benchmarks.md, from what `make bench` and `make gpu` wrote.

python -m bench.report
"""

from __future__ import annotations

import json
from typing import Any

from bench.common import ROOT
from bench.systems import DDP, FSDP2, OURS, FSDP2Resharded, NoCommunication, ZeroRedundancy, Zerox, ZeroxStage3

RESULTS = ROOT / "bench/results/cpu"
GPU_FIGURES = ROOT / "bench/results/2026-11-27-0543-nvidia-h200-figures.json"
SYSTEMS = [each.name for each in (*OURS, DDP, ZeroRedundancy, FSDP2, FSDP2Resharded, NoCommunication)]
MIB = 2**20
# Column -> file, and how many ranks.
STEPS = {
    "2 ranks": ("step", 2),
    "4 ranks": ("step", 4),
    "2 ranks, twice the tokens": ("step-larger-batch", 2),
    "2 ranks, bf16, clipped": ("step-bf16-clip", 2),
}
STAGES = ("step-stages", "memory-stages")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows_of(name: str, ranks: int) -> dict[str, dict[str, Any]]:
    """By system."""
    return {row["system"]: row for row in load(name)["rows"] if row["ranks"] == ranks}


def table(columns: dict[str, dict[str, str]]) -> str:
    """Markdown: a row for each system, a column for each dict of cells by system."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(cells[name] for cells in columns.values())} |" for name in SYSTEMS]
    return "\n".join(lines)


def steps() -> str:
    found = {column: rows_of(*place) for column, place in STEPS.items()}
    return table({column: {name: step_cell(row) for name, row in rows.items()} for column, rows in found.items()})


def step_cell(row: dict[str, Any]) -> str:
    return f"{row['p50_ms']:.0f} ms, {row['as_fast']:.2f}x"


def peaks() -> str:
    found = {f"{ranks} ranks": rows_of("memory", ranks) for ranks in (2, 4)}
    return table({column: {name: peak_cell(row) for name, row in rows.items()} for column, rows in found.items()})


def peak_cell(row: dict[str, Any]) -> str:
    return f"{row['peak'] / MIB:.0f} MiB, {row['of_rival']:.0%}"


def summary() -> str:
    """Steps and peaks of few systems on 2 ranks, beside DDP's."""
    steps_of, peaks_of = rows_of("step", 2), rows_of("memory", 2)
    lines = ["| 2 ranks | step | as fast as DDP | peak of a step | of DDP's |", "|---|---:|---:|---:|---:|"]
    for name in (DDP.name, FSDP2.name, OURS[0].name, NoCommunication.name):
        cells = f"{step_cell(steps_of[name])}, {peak_cell(peaks_of[name])}".split(", ")
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def stages() -> str:
    """Speed and peak of the systems that shard ever more, beside DDP's. No times: the machine was not quiet."""
    lines = [
        "| " + "".join(f"| {n} ranks: as fast as DDP | peak of a step | of DDP's " for n in (2, 4)) + "|",
        f"|---|{'---:|' * 6}",
    ]
    for name in (DDP.name, Zerox.name, ZeroxStage3.name, FSDP2Resharded.name):
        cells = []
        for ranks in (2, 4):
            step, peak = (rows_of(file, ranks)[name] for file in STAGES)
            cells += [f"{step['as_fast']:.2f}x", *peak_cell(peak).split(", ")]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def gpu_rows(part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GPU_FIGURES.read_text())["parts"][part]["rows"]
    return found


def gpu_updates() -> str:
    """Times of updates, the share of a copy's rate at which they move their bytes, and torch's time over ours."""
    rows = {tuple(row[key] for key in ("op", "kind", "state", "size", "who")): row for row in gpu_rows("kernels")}
    sizes = {"256 Mi": "one of 256 Mi elements", "1,000 params": "1,000 of 4 to 64 Ki"}
    columns = " | ".join(f"{size} | of a copy's rate | torch's time" for size in sizes.values())
    lines = [f"| update | moments | {columns} |", f"|---|---|{'---:|' * 6}"]
    for op, kind, state, largest, who in rows:
        if not state or who != "zerox" or largest != "256 Mi" or "fp16" in kind:  # which takes as long as bf16
            continue
        cells = []
        for size in sizes:
            ours = rows[op, kind, state, size, who]
            theirs = [row for key, row in rows.items() if key[:4] == (op, kind, state, size) and "torch" in key[4]]
            cells += [f"{ours['p50_ms']:.2f} ms", f"{ours['of_roof']:.0%}"]
            cells += [f"{theirs[0]['p50_ms'] / ours['p50_ms']:.2f}x" if theirs else ""]
        lines.append(f"| {op}, {kind} | {state} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_steps() -> str:
    rows = {row["system"]: row for row in gpu_rows("step")}
    after = {name: f"{row['update_ms']:.1f} ms" for name, row in rows.items()}
    return table({"a step": {name: step_cell(row) for name, row in rows.items()}, "of it after backward": after})


if __name__ == "__main__":
    print("\n\n".join(each() for each in (summary, steps, peaks, stages, gpu_updates, gpu_steps)))
