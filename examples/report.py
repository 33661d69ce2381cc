"""The results of a run: a table of bytes per rank, and for a comparison one picture and one JSON file."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import CATEGORIES


@dataclass(frozen=True)
class Result:
    """One system's run. Losses are in nats a byte or image, averaged over the ranks; the rest is rank 0's."""

    name: str
    loss: list[float]
    held_out_loss: float
    memory_bytes: dict[str, int]
    step_ms: list[float]

    def steady_ms(self) -> tuple[float, float, float]:
        """(lower quartile, median, upper quartile) of the step times, without the first steps, which warm up."""
        steady = self.step_ms[min(20, len(self.step_ms) // 2) :]
        if len(steady) < 2:
            return (steady[0],) * 3
        return tuple(statistics.quantiles(steady, n=4, method="inclusive"))


def memory_table(columns: dict[str, dict[str, int]]) -> str:
    """Bytes by category, one column each."""
    width = 2 + max(len(text) for name, column in columns.items() for text in (name, f"{sum(column.values()):,}"))
    lines = ["bytes per rank" + "".join(f"{name:>{width}}" for name in columns)]
    for category in CATEGORIES:
        lines.append(f"  {category:<12}" + "".join(f"{column[category]:>{width},}" for column in columns.values()))
    lines.append(f"  {'total':<12}" + "".join(f"{sum(column.values()):>{width},}" for column in columns.values()))
    return "\n".join(lines)


def write_comparison(folder: Path, results: list[Result], facts: dict) -> None:
    """compare.json with every number of the run, and compare.png."""
    systems = [asdict(result) | {"step_ms_quartiles": result.steady_ms()} for result in results]
    (folder / "compare.json").write_text(json.dumps(facts | {"systems": systems}, indent=1) + "\n")
    options = facts["options"]
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] > 1)} on {facts['device'].upper()}"
    model = f"byte-level GPT, {facts['parameters'] / 1e6:.2g} M parameters in {options['dtype']}"
    title = f"{model}, {ranks}, ZeRO stage {options['stage']}, {options['steps']} steps"
    note = "" if options["dtype"] == "fp32" else "\nzerox with fp32 masters and state, torch in bf16 throughout"
    draw(folder / "compare.png", results, title, note)


def draw(path: Path, results: list[Result], title: str, note: str = "", unit: str = "nats per byte") -> None:
    """One PNG, 1500 x 500: the loss curves on each other in ``unit``, memory per rank, step time."""
    import matplotlib

    matplotlib.use("Agg")  # files only: the machine need not have a screen
    import matplotlib.pyplot as plt

    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12}
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 3, figsize=(15, 5), dpi=100, width_ratios=(2.2, 1.2, 1), layout="constrained")
        figure.suptitle(title, fontsize=13)
        _draw_loss(panels[0], results, note, unit)
        _draw_memory(panels[1], results)
        _draw_step_time(panels[2], results)
        figure.savefig(path)
        plt.close(figure)


def _draw_loss(axes, results: list[Result], note: str, unit: str) -> None:
    # Curves that agree hide each other: the first is a broad pale band, the second a thin dashed line upon it.
    looks = ({"linewidth": 7, "color": "#9ecae1"}, {"linewidth": 1.6, "color": "#08306b", "linestyle": (0, (4, 2))})
    block = -(-len(results[0].loss) // 100)  # of steps to a point, or the noise of single batches hides the curve
    for result, look in zip(results, looks, strict=True):
        blocks = [result.loss[start : start + block] for start in range(0, len(result.loss), block)]
        ends = [min((place + 1) * block, len(result.loss)) for place in range(len(blocks))]
        label = f"{result.name}: {result.held_out_loss:.4f} held out"
        axes.plot(ends, [statistics.mean(values) for values in blocks], label=label, **look)
    gap = max(abs(a - b) for a, b in zip(results[0].loss, results[1].loss, strict=True))
    mean_of = f", mean of {block} steps" if block > 1 else ""
    axes.set(title=f"training loss over all ranks{mean_of}", xlabel="step", ylabel=unit)
    axes.legend(title=f"largest gap in any step: {gap:.1g}{note}", frameon=False, alignment="left")
    axes.grid(axis="y", alpha=0.3)


def _draw_memory(axes, results: list[Result]) -> None:
    colors = ("#bdbdbd", "#fdae6b", "#74c476", "#6baed6")
    largest = max(sum(result.memory_bytes.values()) for result in results)
    unit, unit_bytes = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)
    bottoms = [0.0] * len(results)
    for category, color in zip(CATEGORIES, colors, strict=True):
        heights = [result.memory_bytes[category] / unit_bytes for result in results]
        if not any(heights):
            continue  # no system keeps a master here
        axes.bar(_names(results), heights, 0.55, bottom=bottoms, color=color, label=category)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in enumerate(bottoms):
        axes.annotate(f"{total:.3g} {unit}", (place, total), (0, 4), textcoords="offset points", ha="center")
    axes.set(title="memory per rank", ylabel=unit, ylim=(0, max(bottoms) * 1.4))
    axes.legend(frameon=False, ncols=2, loc="upper center")


def _draw_step_time(axes, results: list[Result]) -> None:
    quartiles = [result.steady_ms() for result in results]
    medians = [median for _, median, _ in quartiles]
    whiskers = [[m - low for low, m, _ in quartiles], [high - m for _, m, high in quartiles]]
    axes.bar(_names(results), medians, 0.55, yerr=whiskers, capsize=6, color=("#9ecae1", "#4a6fa5"))
    for place, (_, median, high) in enumerate(quartiles):
        axes.annotate(f"{median:.3g} ms", (place, high), (0, 6), textcoords="offset points", ha="center")
    top = max(high for _, _, high in quartiles)
    axes.set(title="step time, median and quartiles", ylabel="ms", ylim=(0, top * 1.2))


def _names(results: list[Result]) -> list[str]:
    return [result.name.replace(" + ", " +\n") for result in results]
