"""Times the training step of zerox over sizes of its buckets, after a check that they change no bit.

    python -m bench.buckets [--ranks 2 4] [--caps 1 4 16 64] [--dtype bf16] [--clip] [--json FILE] [--png FILE]

Every size has an optimizer in the same processes, one a rank with one thread each, and they take turns. "as fast" is
the median over the rounds of the default's time over this size's. The spread is the middle half of the samples. Beside
the sizes stands the default with a first bucket that leaves as soon as it has 1 MiB, as DDP's does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from bench.facts import write_result
from bench.jobs import WrongResult
from bench.options import parse_step, training_parser
from bench.plots import OTHERS, OURS, colour_of, new_figure, save_figure
from bench.ranks import on_ranks
from bench.step import check, describe, take_turns
from bench.systems import DDP, LR, WEIGHT_DECAY, System, Training, WordGPT, Zerox
from bench.timing import Timing
from zerox import FusedShardedAdam
from zerox.plan.buckets import MIB, BucketPlan, ParamSpec, plan_buckets

CAPS_MIB = (1, 2, 4, 8, 16, 32, 64, 128)
DEFAULT = "default"
FIRST_BYTES = MIB

Row = dict[str, Any]


class Capped(Zerox):
    """``cap_mib``: of a bucket; None: what zerox chooses."""

    def __init__(self, training: Training, cap_mib: int | None) -> None:
        self.cap_mib = cap_mib
        self.name = DEFAULT if cap_mib is None else f"{cap_mib} MiB"
        super().__init__(training)

    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]:
        named = model.named_parameters()
        self.ours = FusedShardedAdam(named, lr=LR, weight_decay=WEIGHT_DECAY, bucket_cap_mb=self.cap_mib)
        return model, self.ours

    @property
    def num_buckets(self) -> int:
        return len(self.ours.inside.buckets)


class FirstSmaller(Capped):
    def __init__(self, training: Training) -> None:
        with patch("zerox.options.plan_buckets", plan_first_smaller):
            super().__init__(training, None)
        self.name = f"{FIRST_BYTES // MIB} MiB first"


def plan_first_smaller(params: Sequence[ParamSpec], world_size: int, cap_bytes: int) -> list[BucketPlan]:
    """As plan_buckets(), but the first bucket is closed by the parameter that fills it to FIRST_BYTES."""
    split, filled = len(params), 0
    while split > 0 and filled < FIRST_BYTES:
        split -= 1
        filled += params[split].nbytes
    first = plan_buckets(params[split:], world_size, max(cap_bytes, filled))
    shifted = [replace(plan, params=tuple(index + split for index in plan.params)) for plan in first]
    return shifted + plan_buckets(params[:split], world_size, cap_bytes)


def time_on_ranks(training: Training, caps_mib: Sequence[int], seconds: float) -> list[Row]:
    """On each rank. Raises WrongResult."""
    systems = [*(Capped(training, cap_mib) for cap_mib in (None, *caps_mib)), FirstSmaller(training)]
    check([DDP(training), *systems], training)
    check_bits(systems)
    ms = take_turns(systems, training, seconds)
    numel = sum(p.numel() for p in systems[0].parameters())
    rows = []
    for system in systems:
        timing = Timing.of(ms[system.name])
        rows.append(
            {
                "name": system.name,
                "cap_mib": system.cap_mib,
                "ranks": dist.get_world_size(),
                "buckets": system.num_buckets,
                "numel": numel,
                **asdict(training),
                **asdict(timing),
                "spread": timing.spread,
                "as_fast": statistics.median(a / b for a, b in zip(ms[DEFAULT], ms[system.name], strict=True)),
            }
        )
    return rows


def check_bits(systems: Sequence[System]) -> None:
    """Parameters are the same to the bit."""
    reference = systems[0].parameters()
    for system in systems[1:]:
        if not all(torch.equal(a, b) for a, b in zip(reference, system.parameters(), strict=True)):
            raise WrongResult(f"buckets of {system.name} give other bits than those of {systems[0].name}")


HEADER = ("ranks", "bucket_cap_mb", "buckets", "p50 ms", "spread", "as fast")


def line(texts: Sequence[str]) -> str:
    return "  ".join(f"{text:>{len(name)}}" for text, name in zip(texts, HEADER, strict=True))


def cells(row: Row) -> tuple[str, ...]:
    cap = row["name"] if row["cap_mib"] is None else str(row["cap_mib"])
    numbers = f"{row['p50_ms']:.1f}", f"{row['spread']:.1%}", f"{row['as_fast']:.2f}x"
    return (str(row["ranks"]), cap, str(row["buckets"]), *numbers)


def save_curves(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel a number of ranks: step time over the cap, with the middle half of the samples, beside the default's."""
    world_sizes = sorted({row["ranks"] for row in rows})
    figure = new_figure(7, 2.6 * len(world_sizes) + 0.4, path)
    if figure is None:
        return
    panels = figure.subplots(len(world_sizes), 1, squeeze=False, sharex=True)[:, 0]
    for panel, world_size in zip(panels, world_sizes, strict=True):
        of_caps = [row for row in rows if row["ranks"] == world_size and row["cap_mib"] is not None]
        [default] = [row for row in rows if row["ranks"] == world_size and row["name"] == DEFAULT]
        caps, p50 = [row["cap_mib"] for row in of_caps], [row["p50_ms"] for row in of_caps]
        panel.fill_between(
            caps,
            [row["p25_ms"] for row in of_caps],
            [row["p75_ms"] for row in of_caps],
            color=colour_of(OURS),
            alpha=0.15,
            linewidth=0,
        )
        panel.plot(caps, p50, color=colour_of(OURS), marker="o", markersize=4, label="p50, middle half")
        panel.axhline(default["p50_ms"], color=OTHERS, linewidth=1, linestyle="--", label="p50 of the default")
        panel.set_xscale("log", base=2)
        panel.set_xticks(caps, [str(cap) for cap in caps])
        panel.set_ylim(0, 1.15 * max(row["p75_ms"] for row in [*of_caps, default]))
        panel.set_ylabel("ms a step")
        panel.set_title(f"{world_size} ranks", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    panels[-1].set_xlabel("bucket_cap_mb")
    figure.suptitle(title)
    save_figure(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_parser("bench.buckets", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="world sizes (default: 2)")
    parser.add_argument("--caps", type=int, nargs="+", default=list(CAPS_MIB), metavar="MIB", help="default: 1 to 128")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 tokens a rank (default: 1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all timing, about (default: %(default)s)")
    return parse_step(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    training = Training(dtype=args.dtype, layers=args.layers, batch=args.batch, max_norm=1.0 if args.clip else None)
    rows: list[Row] = []
    try:
        for world_size in args.ranks:
            found = on_ranks(time_on_ranks, world_size, training, args.caps, args.seconds / len(args.ranks))
            if not rows:
                print(f"{found[0]['numel'] / 1e6:.1f} M parameters, {describe(training)}; results agree")
                print(line(HEADER))
            rows += found
            print("\n".join(line(cells(row)) for row in found), flush=True)
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        write_result(args.json, "bench.buckets", argv, rows)
    if args.png:
        save_curves(rows, f"{rows[0]['numel'] / 1e6:.1f} M parameters, {describe(training)}", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
