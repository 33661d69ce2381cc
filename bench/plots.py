"""Pictures of results. matplotlib comes with the extra `demo`; without it a line says so, and numbers stay numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import Row

OURS, CEILING = "zerox", "stream (ceiling)"


def new_figure(width: float, height: float, path: Path | None) -> Any:
    """Inches. None where there is no ``path``; and where matplotlib is missing, with a line that says so."""
    if path is None:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no picture {path}: matplotlib is not installed")
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path | None) -> None:
    """``figure``: of new_figure() for the same ``path``."""
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def save_shares(rows: Sequence[Row], title: str, path: Path | None) -> None:
    """A panel a size, a line a job: its share of the roof, of everybody who did it."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    jobs = list(dict.fromkeys(job_of(row) for row in rows))
    figure = new_figure(3 + 3.2 * len(sizes), 1.2 + 0.24 * len(jobs), path)
    if figure is None:
        return
    panels = figure.subplots(1, len(sizes), squeeze=False, sharex=True, sharey=True)[0]
    for panel, size in zip(panels, sizes, strict=True):
        for row in (row for row in rows if row["size"] == size):
            ours, ceiling = row["who"] == OURS, row["who"] == CEILING
            panel.plot(
                row["of_roof"],
                jobs.index(job_of(row)),
                marker="|" if ceiling else "o",
                markersize=11 if ceiling else 6 if ours else 5,
                markeredgewidth=2 if ceiling else 1,
                linestyle="",
                color="black" if ceiling else "#c8442c" if ours else "#4d6f8f",
                zorder=3 if ours else 2,
                label="zerox" if ours else "a loop that moves as many bytes" if ceiling else "torch and others",
            )
        panel.axvline(1.0, color="#bbbbbb", linewidth=1, linestyle="--", label="a large copy (CPU: addition)")
        panel.set_xlim(left=0)
        panel.set_xlabel("share of the roof")
        panel.set_title(f"{size} elements" if size[0].isdigit() and size.endswith("i") else size, fontsize=10)
        panel.grid(axis="x", linewidth=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(jobs)), jobs, fontsize=8)
    panels[0].invert_yaxis()
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title)
    save_figure(figure, path)


def job_of(row: Row) -> str:
    state = f", {row['state']} state" if row["state"] else ""
    return f"{row['op']}, {row['kind']}{state}"
