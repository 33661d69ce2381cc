"""Pictures of results. matplotlib comes with the extra `demo`; without it a line says so, and numbers stay numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def draw(
    path: Path | None, title: str, inches: tuple[float, float], paint: Mapping[str, Callable[[Any], None]]
) -> None:
    """A panel above the other for each title in ``paint``, which fills it over milliseconds, the same for all.

    What it gives a label is explained below. Draws nothing without a ``path``, and where matplotlib is missing, with a
    line that says so.
    """
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no picture {path}: matplotlib is not installed")
        return
    figure = Figure(figsize=inches, layout="constrained")
    panels = figure.subplots(len(paint), 1, squeeze=False, sharex=True).flat
    entries: dict[str, Any] = {}
    for panel, (text, fill) in zip(panels, paint.items(), strict=True):
        fill(panel)
        panel.set_title(text, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    panel.set_xlabel("ms")
    columns = max(1, int(inches[0] / 2.4))  # the longest label has about as many inches
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
