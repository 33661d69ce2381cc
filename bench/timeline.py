"""Draws what happened to each bucket in one step, rank below rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.plots import new_figure, save_figure
from bench.trace import Range

PHASES = {"forward": "#d8d8d8", "backward": "#bdbdbd", "clip": "#a8a8a8", "step": "#d8d8d8"}
# What a bucket goes through, in the order of the legend; what is drawn later lies on top.
DRAWN = {
    "queued": "#f2d7cf",
    "pack": "#c8442c",
    "sent": "#9db8d2",
    "reduce": "#3f6a94",
    "update": "#5b8c5a",
    "gather": "#b28bc0",
}
TEXT = {"queued": "launched", "pack": "packing", "sent": "messages under way", "reduce": "reducing"}


def bars_of(ranges: Sequence[Range]) -> list[tuple[int, str, int, int]]:
    """(bucket, name in DRAWN, start_ns, stop_ns), with those that lie between ranges."""
    bars = []
    for each in ranges:
        if each.bucket is not None and each.what in ("pack", "reduce", "update"):
            bars.append((each.bucket, each.what, each.start_ns, each.stop_ns))
    for index in sorted({each.bucket for each in ranges if each.bucket is not None}):
        own = {each.what: each for each in ranges if each.bucket == index}
        bars.append((index, "queued", own["launch"].start_ns, own["pack"].start_ns))
        bars.append((index, "sent", own["pack"].stop_ns, own["wait"].stop_ns))
        bars.append((index, "gather", own["gather"].start_ns, own["gather_wait"].stop_ns))
    return bars


def save_timeline(by_rank: Sequence[Sequence[Range]], titles: Sequence[str], title: str, path: Path) -> None:
    """``by_rank``: ranges of one step. ``titles``: of the ranks."""
    num_buckets = 1 + max(each.bucket for ranges in by_rank for each in ranges if each.bucket is not None)
    figure = new_figure(12, len(by_rank) * (0.8 + 0.27 * (num_buckets + 1)) + 0.6, path)
    if figure is None:
        return
    start_ns = min(each.start_ns for ranges in by_rank for each in ranges)
    panels = figure.subplots(len(by_rank), 1, squeeze=False, sharex=True)[:, 0]
    for panel, ranges, name in zip(panels, by_rank, titles, strict=True):
        draw(panel, ranges, start_ns, num_buckets)
        panel.set_title(name, loc="left", fontsize=10)
    panels[-1].set_xlabel("ms")
    handles = [panels[0].barh([0], [0], color=colour, label=TEXT.get(name, name)) for name, colour in DRAWN.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False)
    figure.suptitle(title)
    save_figure(figure, path)


def draw(panel: Any, ranges: Sequence[Range], start_ns: int, num_buckets: int) -> None:
    for each in ranges:
        if each.what in PHASES and each.bucket is None:
            left, width = (each.start_ns - start_ns) / 1e6, (each.stop_ns - each.start_ns) / 1e6
            panel.barh(0, width, left=left, color=PHASES[each.what], edgecolor="white")
            panel.text(left + width / 2, 0, f"{each.what} {width:.0f}", ha="center", va="center", fontsize=8)
            if each.what == "backward":
                panel.axvline(left + width, color="#444444", linewidth=0.8, linestyle=":")
    for bucket, name, start, stop in bars_of(ranges):
        panel.barh(bucket + 1, (stop - start) / 1e6, left=(start - start_ns) / 1e6, color=DRAWN[name])
    panel.set_yticks(range(num_buckets + 1), ["training", *(f"bucket {index}" for index in range(num_buckets))])
    panel.tick_params(axis="y", length=0, labelsize=8)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
