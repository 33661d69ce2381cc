"""The same training in several layouts, one after the other: a table, and a picture.

All of them read the same windows of text in each step, however many ranks share these out.
"""

import argparse
import copy
import json
import math
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from command import check_picture
from ranks import LOOPBACK, process_group
from torch.multiprocessing.spawn import start_processes

AXES = ("pp", "replicate", "shard", "experts", "tp")
LAYOUTS = (
    {},
    {"tp": 2},
    {"pp": 2},
    {"replicate": 2, "shard": 2},
    {"experts": 2},
    {"pp": 2, "shard": 2, "tp": 2},
)
WINDOWS = 8  # of all ranks in a micro-batch: each number of ranks that read text divides it
DENSE, MIXED = "one rank", "experts 2"  # a layout of each model
KILO = 1000


@dataclass(frozen=True)
class Outcome:
    """Losses of each step, here and in one process, and the model's parameters. The rest is the most of any rank."""

    losses: list[float]
    of_twin: list[float]
    of_model: int
    apart: float
    norm: float
    numel: float
    state_bytes: float


Train = Callable[[argparse.Namespace], Outcome]


def name_of(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def num_ranks(sizes: dict[str, int]) -> int:
    return math.prod(sizes.values())


def compare(options: argparse.Namespace, train: Train) -> None:
    check_picture(options.picture)
    found = {}
    print(f"{'layout':<22}{'ranks':>6}{'last loss':>11}{'param':>9}{'norm':>9}{'parameters':>12}{'state bytes':>13}")
    for sizes in LAYOUTS:
        outcome = found[name_of(sizes)] = run(sizes, options, train)
        print(
            f"{name_of(sizes):<22}{num_ranks(sizes):>6}{outcome.losses[-1]:>11.4f}{outcome.apart:>9.1e}"
            f"{outcome.norm:>9.1e}{outcome.numel:>12,.0f}{outcome.state_bytes:>13,.0f}",
            flush=True,
        )
    print("param, norm: the farthest parameter and relative gradient norm from one process with AdamW")
    dense, mixed = (found[name].of_model for name in (DENSE, MIXED))
    print(f"parameters, state bytes: of a rank, at most; the model has {dense:,} parameters, with experts {mixed:,}")
    if options.picture:
        draw(options.picture, found)


def run(sizes: dict[str, int], options: argparse.Namespace, train: Train) -> Outcome:
    """Forks the ranks, which is quicker than to import torch in each."""
    options = copy.copy(options)
    for axis in AXES:
        setattr(options, axis, sizes.get(axis, 1))
    options.windows = WINDOWS // (options.replicate * options.shard * options.experts)
    torch.set_num_threads(1)  # a process with more threads must not be forked
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    facts = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "GROUP_WORLD_SIZE": 1, "WORLD_SIZE": num_ranks(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "outcome.json")
        start_processes(be_rank, (facts, options, train, result), num_ranks(sizes), start_method="fork")
        return Outcome(**json.loads(result.read_text()))


def be_rank(rank: int, facts: dict, options: argparse.Namespace, train: Train, result: Path) -> None:
    os.environ |= {name: str(value) for name, value in facts.items()} | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    warnings.filterwarnings(
        "ignore", "zerox: .* as replicated over axis"
    )  # true, and between rows of a table in the way
    with process_group(torch.device("cpu")):
        outcome = train(options)
        if dist.get_rank() == 0:
            result.write_text(json.dumps(asdict(outcome)))


def draw(path: Path, found: dict[str, Outcome]) -> None:
    """One PNG, 1300 x 480: the loss of each layout upon that of one process, and the bytes of a rank."""
    import matplotlib

    matplotlib.use("Agg")  # files only: the machine need not have a screen
    import matplotlib.pyplot as plt

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 2, figsize=(13, 4.8), dpi=100, width_ratios=(1.5, 1), layout="constrained")
        _draw_loss(panels[0], found)
        _draw_bytes(panels[1], found)
        figure.savefig(path)
        plt.close(figure)


def _draw_loss(axes, found: dict[str, Outcome]) -> None:
    # All curves of one model agree. So that of one process is a broad pale band, and each layout has some steps on it.
    steps = len(found[DENSE].losses)
    bands = {DENSE: ("the GPT", 9, "#c6dbef"), MIXED: ("with experts", 3, "#fdae6b")}
    for name, (model, width, color) in bands.items():
        label = f"AdamW in one process, {model}"
        axes.plot(range(1, steps + 1), found[name].of_twin, linewidth=width, color=color, label=label)
    every = max(len(found), steps // 8)
    for place, (name, outcome) in enumerate(found.items()):
        own = range(place * every // len(found), steps, every)
        gap = max(abs(a - b) for a, b in zip(outcome.losses, outcome.of_twin, strict=True))
        marks = [outcome.losses[step] for step in own]
        axes.plot([step + 1 for step in own], marks, "osD^vP"[place], markersize=6, label=f"{name}: {gap:.0e} apart")
    axes.set(title="training loss, and its largest gap to one process in any step", xlabel="step", ylabel="nats a byte")
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.3)


def _draw_bytes(axes, found: dict[str, Outcome]) -> None:
    names = list(found)[::-1]
    params = [found[name].numel * 4 / KILO for name in names]
    state = [found[name].state_bytes / KILO for name in names]
    axes.barh(names, params, 0.55, color="#bdbdbd", label="parameters")
    axes.barh(names, state, 0.55, left=params, color="#6baed6", label="optimizer state")
    whole = [found[name].of_model * 3 * 4 / KILO for name in names]  # a parameter and two moments of float32
    axes.plot(whole, names, "|", color="#252525", markersize=22, label="AdamW in one process")
    for place, total in enumerate(map(sum, zip(params, state, strict=True))):
        axes.annotate(f"{total:,.0f}", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set(title="what a rank keeps, at most", xlabel="kB")
    axes.set_xlim(0, max(whole) * 1.05)
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.62), markerscale=0.6)
