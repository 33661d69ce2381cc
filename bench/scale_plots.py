"""The picture of bench.scale: the model beside what was measured, and direct beside native exchange."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.plots import COLOURS, FLOOR, OTHERS, OURS

Row = dict[str, Any]
KIB, MIB = 2**10, 2**20


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def save_picture(rows: Sequence[Row], path: Path) -> None:
    """A panel for each part that there are rows of."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no picture {path}: matplotlib is not installed")
        return
    panels = [(draw, found) for part, draw in DRAWN.items() if (found := of_part(rows, part))]
    if not panels:
        print(f"no picture {path}: nothing to draw in these parts")
        return
    height = 1 + (len(panels) - 1) // 2
    width = min(2, len(panels))
    figure = Figure(figsize=(6.2 * width, 4.1 * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(height, width, squeeze=False).ravel()
    for axis, (draw, found) in zip(axes, panels, strict=False):
        draw(axis, found)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_steps(axis: Any, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    axis.bar([place - 0.2 for place in places], [row["steady_ms"] for row in rows], 0.4, color=OTHERS, label="measured")
    axis.bar(
        [place + 0.2 for place in places],
        [row["predicted_ms"] for row in rows],
        0.4,
        color=COLOURS[OURS],
        label="model",
    )
    axis.bar(
        places,
        [row["alone_ms"] for row in rows],
        0.8,
        color=COLOURS[FLOOR],
        alpha=0.75,
        label="compute and own updates",
    )
    for place, row in zip(places, rows, strict=True):
        top = max(row["predicted_ms"], row["steady_ms"])
        axis.annotate(f"{row['error']:+.0%}", (place, top), ha="center", va="bottom", fontsize=9)
    axis.set_xticks(list(places), [f"{row['ranks']} ranks\n{row['exchange']}" for row in rows], fontsize=8)
    axis.margins(y=0.12)
    axis.set_title("a training step, ms, and the model's error", loc="left", fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def draw_wire(axis: Any, rows: Sequence[Row]) -> None:
    for shade, ranks in zip((0.45, 0.7, 1.0), sorted({row["ranks"] for row in rows}), strict=False):
        found = [row for row in rows if row["ranks"] == ranks]
        axis.plot(
            [row["slice_bytes"] / KIB for row in found],
            [row["native_over_direct"] for row in found],
            marker="o",
            color=OTHERS,
            alpha=shade,
            label=f"{ranks} ranks",
        )
    axis.axhline(1.0, color=COLOURS[OURS], linewidth=1)
    _log_2(axis, "KiB a slice")
    axis.set_ylim(bottom=0)
    axis.set_title("measured: native's time over direct's, gloo on loopback", loc="left", fontsize=10)
    axis.legend(fontsize=8, frameon=False)


def draw_bounds(axis: Any, rows: Sequence[Row]) -> None:
    ranks = [row["ranks"] for row in rows]
    nbytes = rows[0]["slice_bytes"][1]
    shown = {"direct": COLOURS[OURS], "ring": OTHERS, "gloo": "#8fa9c2", "log steps": COLOURS[FLOOR]}
    for name, colour in shown.items():
        times = [row[f"{name}_us"][1] / 1e3 for row in rows]
        axis.plot(ranks, times, marker="o", color=colour, label=name)
    axis.set_yscale("log")
    _log_2(axis, "ranks")
    net = rows[0]["network"]
    about = f"{net['latency_s'] * 1e6:g} us, {net['bytes_per_s'] / 1e9:g} GB/s"
    axis.set_title(f"model: ms of a round of {nbytes / KIB:.0f} KiB slices; {about}", loc="left", fontsize=10)
    axis.legend(fontsize=8, frameon=False)


def draw_caps(axis: Any, rows: Sequence[Row]) -> None:
    """Of the largest model that was swept."""
    model = rows[-1]["model"]
    kinds = sorted({(row["exchange"], row["ranks"]) for row in rows})
    most = max(ranks for _, ranks in kinds)
    for exchange, ranks in kinds:
        found = [row for row in rows if (row["model"], row["exchange"], row["ranks"]) == (model, exchange, ranks)]
        colour = COLOURS[OURS] if exchange == "direct" else OTHERS
        sizes = [row["cap_bytes"] / MIB for row in found]
        axis.plot(
            sizes,
            [row["step_s"] for row in found],
            color=colour,
            alpha=(ranks / most) ** 0.4,
            label=f"{exchange}, {ranks:,}",
        )
        for row in found:
            if row["is_default"]:
                axis.plot(row["cap_bytes"] / MIB, row["step_s"], marker="o", color=colour)
    _log_2(axis, "MiB a bucket")
    axis.set_ylim(bottom=0, top=4 * min(row["step_s"] for row in rows if row["model"] == model))
    axis.set_title(f"model: seconds of a step of {model}; the dots are defaults", loc="left", fontsize=10)
    axis.legend(fontsize=8, frameon=False)


def _log_2(axis: Any, label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_xlabel(label, fontsize=9)


DRAWN = {"step": draw_steps, "wire": draw_wire, "bound": draw_bounds, "cap": draw_caps}
