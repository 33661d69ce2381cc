"""Muon beside AdamW in quality: held-out losses of a small GPT at equal steps, and at equal processor time.

    python -m bench.muon [--steps 400] [--seeds 3] [--json bench/results/muon-beside-adamw.json]

Each run is `examples/train_gpt.py --optimizer ... --lr ... --seed ...`, alone on one thread. Muon trains --steps steps;
AdamW trains as many, and again as many as take the same processor time. Each of the three first gets its learning rate,
the best of four with a seed of its own. Under Muon AdamW's learning rate, of embeddings, head and norms, is the
example's default. Processor time is that of a run less that of one of few steps, which has the same start and end; it
does not depend on what else the machine does, but on the CPU: without bfloat16 units Newton-Schulz takes it most of
the time, where a GPU takes little.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

from bench.common import ROOT, Row, new_parser, parse, write_result

SHAPE = ("--size", "tiny", "--context", "64", "--batch", "16")
RATES = {"adamw": (0.003125, 0.00625, 0.0125, 0.025), "muon": (0.01, 0.02, 0.04, 0.08)}
TUNING_SEED = 1000
FEW_STEPS = 20
# A row is of one optimizer and number of steps: its held-out losses in nats a byte, by seed; the loss of the tuning
# seed by learning rate; the learning rate that was best there; processor milliseconds a step.


class Run(NamedTuple):
    optimizer: str
    lr: float
    steps: int
    seed: int


def command(run: Run) -> list[str]:
    options = ["--optimizer", run.optimizer, "--lr", str(run.lr), "--steps", str(run.steps), "--seed", str(run.seed)]
    return [sys.executable, "examples/train_gpt.py", *SHAPE, *options, "--device", "cpu", "--quiet"]


def train(run: Run) -> tuple[float, float]:
    """(held-out loss, processor seconds)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    before = _seconds_of_children()
    done = subprocess.run(command(run), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    loss = re.search(r"held-out loss ([\d.]+) nats", done.stdout)
    if loss is None:
        raise ValueError(f"the example printed no result:\n{done.stdout[-2000:]}")
    return float(loss[1]), _seconds_of_children() - before


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tuned(optimizer: str, steps: int, seeds: int) -> Row:
    tries = {lr: train(Run(optimizer, lr, steps, TUNING_SEED))[0] for lr in RATES[optimizer]}
    best = min(tries, key=lambda lr: tries[lr])
    runs = [train(Run(optimizer, best, steps, seed)) for seed in range(seeds)]
    _, of_few = train(Run(optimizer, best, FEW_STEPS, TUNING_SEED))
    step_ms = (statistics.median(seconds for _, seconds in runs) - of_few) / (steps - FEW_STEPS) * 1e3
    row = {"optimizer": optimizer, "steps": steps, "lr": best, "losses": [loss for loss, _ in runs]}
    print(f"{row} {tries} {step_ms:.1f} ms a step", flush=True)
    return {**row, "tried": {str(lr): loss for lr, loss in tries.items()}, "step_ms": step_ms}


def table(found: list[Row]) -> str:
    """Markdown, a row for each training."""
    lines = ["| optimizer | steps | learning rate | held-out loss, mean | largest - smallest | processor time |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in found:
        losses = row["losses"]
        cells: list[Any] = [{"adamw": "AdamW", "muon": "Muon"}[row["optimizer"]], f"{row['steps']:,}", row["lr"]]
        cells += [f"{statistics.fmean(losses):.4f}", f"{max(losses) - min(losses):.4f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['steps'] * row['step_ms'] / 1e3:.0f} s |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    numbers = {"steps": {"type": int, "default": 400}, "seeds": {"type": int, "default": 3, "help": "0, 1, ..."}}
    args = parse(new_parser("bench.muon", __doc__, **numbers), argv)
    if args.steps <= FEW_STEPS:
        raise SystemExit(f"--steps must be over {FEW_STEPS}")
    muon, adamw = (tuned(optimizer, args.steps, args.seeds) for optimizer in ("muon", "adamw"))
    longer = round(args.steps * muon["step_ms"] / adamw["step_ms"])
    found = [muon, adamw, tuned("adamw", longer, args.seeds)]
    print(f"\n{table(found)}")
    write_result(args, found, shape=" ".join(SHAPE))


if __name__ == "__main__":
    main()
