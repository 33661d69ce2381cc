"""What smaller moments cost in quality: held-out losses of the demo's model for each state_dtype, over several seeds.

    python -m bench.moments [--steps 1000] [--seeds 3] [--json docs/moments.json]

Each run is `examples/train_gpt.py --state-dtype ... --seed ...` on 2 CPU ranks; its losses depend on the seed and the
build of torch, not on how busy the machine is. Ends with 1 if a mean is more than 0.5% from that of fp32 moments.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence

from bench.common import ROOT, Row, new_parser, parse, write_result

STATE_DTYPES = ("fp32", "bf16", "8bit")
BOUND = 0.005  # of the loss with fp32 moments
# A row is of one state_dtype: its held-out losses in nats a byte, by seed; the moments' bytes on rank 0.


def command(state_dtype: str, seed: int, steps: int) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--local-addr=127.0.0.1", "--nproc-per-node=2"]
    options = ["--state-dtype", state_dtype, "--seed", str(seed), "--steps", str(steps), "--device", "cpu", "--quiet"]
    return [*launch, "examples/train_gpt.py", *options]


def train(state_dtype: str, seed: int, steps: int) -> tuple[float, int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = command(state_dtype, seed, steps)
    return read(subprocess.run(run, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def read(output: str) -> tuple[float, int]:
    """(held-out loss, bytes of moments) from what the example prints."""
    loss = re.search(r"held-out loss ([\d.]+) nats", output)
    moments = re.search(r"^\s+moments\s+([\d,]+)", output, re.M)
    if loss is None or moments is None:
        raise ValueError(f"the example printed no result:\n{output[-2000:]}")
    return float(loss[1]), int(moments[1].replace(",", ""))


def change(row: Row, first: Row) -> float:
    """Of the mean loss, from the other's, as a share of it."""
    return statistics.fmean(row["losses"]) / statistics.fmean(first["losses"]) - 1


def columns_of_losses(found: Sequence[Row]) -> str:
    return f"held-out loss, mean of {len(found[0]['losses'])} seeds | largest - smallest | to fp32"


def cells_of_losses(row: Row, first: Row) -> str:
    losses = row["losses"]
    return f"{statistics.fmean(losses):.4f} | {max(losses) - min(losses):.4f} | {change(row, first):+.2%}"


def table(found: list[Row]) -> str:
    """Markdown, a row for each state_dtype; the first is what the others are held against."""
    lines = [f"| state_dtype | {columns_of_losses(found)} | bytes of moments |", "|---|---:|---:|---:|---:|"]
    for row in found:
        lines.append(f"| {row['state_dtype']} | {cells_of_losses(row, found[0])} | {row['moments_bytes']:,} |")
    return "\n".join(lines)


def missed(found: list[Row]) -> list[str]:
    """What is further from fp32 than the bound."""
    return [row["state_dtype"] for row in found if abs(change(row, found[0])) > BOUND]


def main(argv: list[str] | None = None) -> int:
    seeds = {"type": int, "default": 3, "help": "0, 1, ..."}
    args = parse(new_parser("bench.moments", __doc__, steps={"type": int, "default": 1000}, seeds=seeds), argv)
    found: list[Row] = []
    for state_dtype in STATE_DTYPES:
        runs = [train(state_dtype, seed, args.steps) for seed in range(args.seeds)]
        found.append({"state_dtype": state_dtype, "losses": [loss for loss, _ in runs], "moments_bytes": runs[0][1]})
        print(f"{state_dtype}: {found[-1]['losses']}", flush=True)
    print(f"\n{table(found)}")
    write_result(args, found, ranks=2)
    if bad := missed(found):
        print(f"further than {BOUND:.1%} from fp32 moments: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
