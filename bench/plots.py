"""Pictures of results. matplotlib comes with the extra `demo`; without it a line says so, and numbers stay numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS, FLOOR = "zerox", "no communication"
COLOURS = {OURS: "#c8442c", FLOOR: "#bbbbbb"}
OTHERS = "#4d6f8f"


def colour_of(system: str) -> str:
    return next((colour for word, colour in COLOURS.items() if word in system), OTHERS)


def new_figure(width: float, height: float, path: Path) -> Any:
    """Inches. None, and a line that says that there will be no ``path``, where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no picture {path}: matplotlib is not installed")
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def save_bars(numbers: Sequence[tuple[str, str, float]], title: str, path: Path) -> None:
    """``numbers``: (panel, system, value). A bar a system with the value beside it."""
    groups: dict[str, dict[str, float]] = {}
    for panel, system, value in numbers:
        groups.setdefault(panel, {})[system] = value
    most = max(len(values) for values in groups.values())
    figure = new_figure(7, len(groups) * (0.45 + 0.33 * most) + 0.3, path)
    if figure is None:
        return
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for panel, (name, values) in zip(panels, groups.items(), strict=True):
        bars = panel.barh(list(values), list(values.values()), color=[colour_of(system) for system in values])
        panel.bar_label(bars, [f"{value:,.{0 if value >= 10 else 2}f}" for value in values.values()], padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(name, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save_figure(figure, path)
