"""Pictures of results. matplotlib comes with the extra `demo`; without it a line says so, and numbers stay numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


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
