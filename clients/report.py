"""How far one run is from another, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clients.launch import Result

WAYS = ("on 2", "on 3", "on 1", "from its file", "by itself")  # to go on: see clients/resumed.py
NEEDED = 10  # a planted fault is that far above what is allowed


def differences(base: Result, other: Result) -> dict[str, Any]:
    found: dict[str, Any] = {
        "losses": _largest(base.losses, other.losses),
        "evaluations": _largest(base.evaluations, other.evaluations),
    }
    if len(base.grads) == len(other.grads):
        pairs = list(zip(base.grads, other.grads, strict=True))
        found["gradients"] = len(pairs)
        found["of other bits"] = sum(not _are_equal(one, another) for one, another in pairs)
    return found


def table(rows: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """In Markdown, and how many rows are not as they should be."""
    head = ["script", "lines", "steps", "allowed", "stage 1", "stage 2", "stage 3", "gradients", "faults"]
    cells = []
    for row in rows:
        stages = {str(stage): found for stage, found in row["stages"].items()}
        by_stage = [_said(stages.get(str(stage))) for stage in (1, 2, 3)]
        bits = {found.get("of other bits") for found in stages.values()}
        grads = "equal" if bits == {0} else "not compared" if None in bits else f"{max(bits)} differ"
        faults = ", ".join(f"{fault} {_said(found)}" for fault, found in row["faults"].items())
        allowed = f"{row['allowed']:.0e}"
        cells.append([row["name"], row["changed lines"], row["steps"], allowed, *by_stage, grads, faults])
    return _markdown(head, cells), sum(not is_good(row) for row in rows)


def table_of_resumed(rows: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """In Markdown, and how many rows are not as they should be."""
    ways = ["2 ranks", "3 ranks", "1 rank", "from its file", "by itself"]
    cells = []
    for row in rows:
        for stage, found in row["stages"].items():
            said = [_said(found.get("saves") or found.get(way)) for way in WAYS]
            forgets = _said(row["faults"]["forgets"])
            cells.append([row["name"], row["steps"], f"{row['allowed']:.0e}", stage, *said, forgets])
    head = ["script", "steps", "allowed", "stage", *ways, "if it forgets"]
    return _markdown(head, cells), sum(not is_resumed_well(row) for row in rows)


def _markdown(head: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    first, *rest = (f"| {' | '.join(map(str, line))} |" for line in (head, *cells))
    return "\n".join([first, "|---" * len(head) + "|", *rest])


def is_resumed_well(row: dict[str, Any]) -> bool:
    """All resumed runs within what is allowed, and one that forgets its optimizer far above it."""
    found = [_worst(each) for stage in row["stages"].values() for each in stage.values()]
    return max(found) <= row["allowed"] and _worst(row["faults"]["forgets"]) > NEEDED * row["allowed"]


def is_good(row: dict[str, Any]) -> bool:
    """Stages within what is allowed, with the first mean gradients of the same bits, and each planted fault far above
    it."""
    stages, allowed = row["stages"].values(), row["allowed"]
    if row["same bits"] and any(found.get("of other bits") != 0 for found in stages):
        return False
    faults = [_worst(found) for found in row["faults"].values()]
    return all(_worst(found) <= allowed for found in stages) and all(each > NEEDED * allowed for each in faults)


def _worst(found: dict[str, Any]) -> float:
    return float("inf") if "failed" in found else max(found["losses"], found["evaluations"])


def _said(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    return "failed" if "failed" in found else f"{_worst(found):.1e}"


def _largest(one: list[list[float]], other: list[list[float]]) -> float:
    """As a part of the first, or of 1 if that is less. Infinite if there are more of one."""
    if [len(each) for each in one] != [len(each) for each in other]:
        return float("inf")
    pairs = [pair for ours, theirs in zip(one, other, strict=True) for pair in zip(ours, theirs, strict=True)]
    return max((abs(a - b) / max(1.0, abs(a)) if a == a or b == b else 0.0 for a, b in pairs), default=0.0)


def _are_equal(one: Any, other: Any) -> bool:
    return (one is None) == (other is None) and (one is None or torch.equal(one, other))
