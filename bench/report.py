"""The tables and sentences of speed and memory in README.md and docs, from what `make bench` and `make gpu` wrote.

python -m bench.report

A system's peak is that of memory.json wherever it is told: that of stages 1 and 2 differs from run to run.
"""

from __future__ import annotations

import json
from typing import Any

from bench.common import ROOT
from bench.systems import (
    DDP,
    FSDP2,
    OURS,
    FSDP2Resharded,
    NoCommunication,
    ZeroRedundancy,
    Zerox,
    ZeroxScaled,
    ZeroxStage3,
    ZeroxTorchsCalls,
)

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
STAGES = ("step-stages", "memory")
LIMITS = {  # of bench.residency, as the docs call them
    "least": "the least: 32 MiB",
    "64 MiB": "`resident_mb=64`",
    "default": "default",
    "inf": "`inf`",
}
WRAPPED = {  # of bench.wrapper, as the docs call them
    "forward adds": "a training forward of 40 small layers adds",
    "forward adds, with buffers": "with the buffers of batch norm",
    "constructor": "the constructor sends",
    "first look": "the first step's look at 1 GiB, and a sum of it",
    "compiled step": "a step of a GPT in torch.compile",
}


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


def stages_line() -> str:
    """README's, of 4 ranks."""
    speeds, peaks_of = (rows_of(name, 4) for name in STAGES)

    def said(name: str) -> tuple[str, str]:
        return f"{peaks_of[name]['of_rival']:.0%}", f"{speeds[name]['as_fast']:.2f} times"

    ours, theirs = said(ZeroxStage3.name), said(FSDP2Resharded.name)
    return (
        f"On 4 ranks stage 3 takes {ours[0]} of DDP's memory at {ours[1]} its speed, and FSDP2 resharded takes "
        f"{theirs[0]} at {theirs[1]}."
    )


def range_line() -> str:
    """Between which bytes stage 2's peak may be."""
    found = {ranks: [each / MIB for each in rows_of("memory", ranks)[Zerox.name]["estimate"]] for ranks in (2, 4)}
    spans = [f"{least:.0f} to {most:.0f} MiB on {ranks} ranks" for ranks, (least, most) in found.items()]
    return (
        "A bucket that leaves late stays beside the next one, so stage 2's peak is anything from "
        f"{' and '.join(spans)}, by `zerox.estimate`, in one run or another."
    )


def residency() -> str:
    """Each limit of resident parameters, beside stage 2 and FSDP2."""
    columns = ("peak", "of stage 2's speed", "of FSDP2's, resharded", "fetched")
    lines = [
        f"| | {' | '.join(f'{ranks} ranks: {columns[0]} | ' + ' | '.join(columns[1:]) for ranks in (2, 4))} |",
        f"|---|{'---:|' * 8}",
    ]
    limits = {f"stage 3, {limit}": f"stage 3, {said}" for limit, said in LIMITS.items()}
    for name, said in ({Zerox.name: "stage 2"} | limits | {FSDP2Resharded.name: FSDP2Resharded.name}).items():
        cells = []
        for ranks in (2, 4):
            row = rows_of("residency", ranks)[name]
            mib = row["peak_mib"] if name in limits else rows_of("memory", ranks)[name]["peak"] / MIB
            fetched = f"{row['fetched_mib']:.0f} MiB" if name in limits else ""
            cells += [f"{mib:.0f} MiB", f"{row['of_stage_2']:.2f}x", f"{row['of_fsdp2']:.2f}x", fetched]
        lines.append(f"| {' | '.join([said, *cells])} |".replace("|  |", "| |"))
    return "\n".join(lines)


def room_line() -> str:
    """docs/sharded-parameters.md's, of 4 ranks."""
    row, peaks_of = rows_of("residency", 4)["stage 3, 64 MiB"], rows_of("memory", 4)
    stage_2, fsdp2 = (f"{peaks_of[name]['peak'] / MIB:.0f}" for name in (Zerox.name, FSDP2Resharded.name))
    return (
        f"On 4 ranks, with room for 64 MiB of 160, a step took {row['peak_mib']:.0f} MiB, where stage 2 took {stage_2} "
        f"and FSDP2 resharded {fsdp2}; it ran at {row['of_stage_2']:.2f} times stage 2's speed and "
        f"{row['of_fsdp2']:.1f} times FSDP2's"
    )


def wrapper() -> str:
    """zerox.DistributedDataParallel beside torch's, and torch's calls on gradients that have left beside others."""
    lines = ["| 2 ranks | beside | zerox | |", "|---|---:|---:|---:|"]

    def add(what: str, unit: str, beside: float, ours: float, ratio: float) -> None:
        lines.append(f"| {what} | {beside:,.1f} {unit} | {ours:,.1f} {unit} | {ratio:.2f}x |")

    for row in load("wrapper")["rows"]:
        add(WRAPPED[row["what"]], row["unit"], row["torchs"], row["zerox"], row["ratio"])
    host = [row for row in load("host")["rows"] if row["ranks"] == 2]
    clips = {row["of"]: row["tenth_us"] / 1e3 for row in host if row["what"] == "torch's clip"}
    plain, placeholders = clips["plain gradients"], clips["placeholders"]
    add(
        "torch's clip of 1,000 gradients of 64 x 64: plain ones, and p.grad",
        "ms",
        plain,
        placeholders,
        placeholders / plain,
    )
    own, torchs = (rows_of("step-torchs-calls", 2)[each.name]["p50_ms"] for each in (ZeroxScaled, ZeroxTorchsCalls))
    add("a step with a clip and a scaler: the optimizer's and zerox', and torch's", "ms", own, torchs, torchs / own)
    return "\n".join(lines)


def wrapper_sources() -> str:
    return "; ".join(f"{name}: commit {load(name)['commit'][:7]}" for name in ("wrapper", "host", "step-torchs-calls"))


def sources() -> str:
    """Which commit each file's numbers are of."""
    names = [*dict.fromkeys((*(name for name, _ in STEPS.values()), *STAGES, "residency"))]
    by_commit: dict[str, list[str]] = {}
    for name in names:
        by_commit.setdefault(load(name)["commit"][:7], []).append(name)
    return "; ".join(f"{', '.join(those)}: commit {commit}" for commit, those in by_commit.items())


def gpu_line() -> str:
    """README's, of the fp32 update alone."""
    rows = [row for row in gpu_rows("kernels") if (row["op"], row["kind"], row["state"]) == ("adam", "fp32", "fp32")]
    ours = {row["size"]: row for row in rows if row["who"] == "zerox"}
    theirs = {row["size"]: row["p50_ms"] for row in rows if "torch" in row["who"]}
    one, many = ours["256 Mi"], ours["1,000 params"]
    faster = [theirs[row["size"]] / row["p50_ms"] for row in (one, many)]
    low, high = sorted((one["of_roof"], many["of_roof"]))
    return (
        f"On an H200 the fp32 update alone runs at {low:.0%} to {high:.0%} of the rate of a copy: {faster[0]:.2f} "
        "times as fast as torch's fused AdamW for one parameter of 256 Mi elements, and "
        f"{faster[1]:.1f} times for 1,000 small ones."
    )


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
    texts = (
        summary,
        stages_line,
        gpu_line,
        steps,
        peaks,
        range_line,
        stages,
        residency,
        room_line,
        sources,
        wrapper,
        wrapper_sources,
        gpu_updates,
    )
    print("\n\n".join(each() for each in (*texts, gpu_steps)))
