"""Pictures of results. matplotlib comes with the extra `demo`; without it a line says so, and numbers stay numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import Row

OURS, CEILING = "zerox", "stream (ceiling)"


def draw(
    path: Path | None,
    title: str,
    shape: tuple[int, int],
    inches: tuple[float, float],
    paint: Callable[[list[Any]], None],
) -> None:
    """``paint`` fills the panels, of which there are ``shape``: rows and columns. What it gives a label is explained.

    Draws nothing without a ``path``, and where matplotlib is missing, with a line that says so.
    """
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no picture {path}: matplotlib is not installed")
        return
    figure = Figure(figsize=inches, layout="constrained")
    panels = list(figure.subplots(*shape, squeeze=False, sharex=True).flat)
    paint(panels)
    entries: dict[str, Any] = {}
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    columns = max(1, int(inches[0] / 2.4))  # the longest label has about as many inches
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def save_shares(rows: Sequence[Row], title: str, path: Path | None) -> None:
    """A panel a size, a line a job: its share of the roof, of everybody who did it."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    jobs = list(dict.fromkeys(job_of(row) for row in rows))
    marks: dict[str, dict[str, Any]] = {
        OURS: {"label": "zerox", "color": "#c8442c", "marker": "o", "zorder": 3},
        CEILING: {"label": "a loop that moves as many bytes", "color": "black", "marker": "|", "markersize": 11},
    }
    others = {"label": "torch and others", "color": "#4d6f8f", "marker": "o"}

    def paint(panels: list[Any]) -> None:
        for panel, size in zip(panels, sizes, strict=True):
            for row in (row for row in rows if row["size"] == size):
                panel.plot(row["of_roof"], jobs.index(job_of(row)), linestyle="", **marks.get(row["who"], others))
            panel.axvline(1.0, color="#bbbbbb", linestyle="--", label="a large copy (CPU: addition)")
            panel.set_xlabel("share of the roof")
            panel.set_title(f"{size} elements" if size[0].isdigit() and size.endswith("i") else size, fontsize=10)
            panel.set_xlim(left=0)
            panel.grid(axis="x", linewidth=0.3)
            panel.set_yticks(range(len(jobs)), jobs if panel is panels[0] else [""] * len(jobs), fontsize=8)
            panel.set_ylim(len(jobs) - 0.5, -0.5)  # the same in all panels, whatever jobs they have

    draw(path, title, (1, len(sizes)), (3 + 3.2 * len(sizes), 1.2 + 0.24 * len(jobs)), paint)


def job_of(row: Row) -> str:
    state = f", {row['state']} state" if row["state"] else ""
    return f"{row['op']}, {row['kind']}{state}"
