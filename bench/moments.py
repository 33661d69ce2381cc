"""What smaller moments cost in quality: held-out losses of the demo's model for each state_dtype, over several seeds.

    python -m bench.moments [--steps 1000] [--seeds 3] [--json docs/moments.json]

Each run is `examples/train_gpt.py --state-dtype ... --seed ...` on 2 CPU ranks; its losses depend on the seed and the
build of torch, not on how busy the machine is. Ends with 1 if a mean is more than 0.5% from that of fp32 moments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.facts import ROOT, facts

STATE_DTYPES = ("fp32", "bf16", "8bit")
BOUND = 0.005  # of the loss with fp32 moments


@dataclass(frozen=True)
class Quality:
    """Held-out losses of one state_dtype, in nats a byte, by seed; the moments' bytes on rank 0."""

    state_dtype: str
    losses: list[float]
    moments_bytes: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        return max(self.losses) - min(self.losses)


def command(state_dtype: str, seed: int, steps: int) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--local-addr=127.0.0.1", "--nproc-per-node=2"]
    options = ["--state-dtype", state_dtype, "--seed", str(seed), "--steps", str(steps), "--device", "cpu", "--quiet"]
    return [*launch, "examples/train_gpt.py", *options]


def read(output: str) -> tuple[float, int]:
    """(held-out loss, bytes of moments) from what the example prints."""
    loss = re.search(r"held-out loss ([\d.]+) nats", output)
    moments = re.search(r"^\s+moments\s+([\d,]+)", output, re.M)
    if loss is None or moments is None:
        raise ValueError(f"the example printed no result:\n{output[-2000:]}")
    return float(loss[1]), int(moments[1].replace(",", ""))


def train(state_dtype: str, seed: int, steps: int) -> tuple[float, int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command(state_dtype, seed, steps), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{state_dtype}, seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return read(done.stdout)


def table(found: list[Quality]) -> str:
    """Markdown, a row for each state_dtype; the first is what the others are held against."""
    seeds = len(found[0].losses)
    lines = [
        f"| state_dtype | held-out loss, mean of {seeds} seeds | largest - smallest | to fp32 | bytes of moments |"
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for each in found:
        change = f"{each.mean / found[0].mean - 1:+.2%}"
        lines.append(
            f"| {each.state_dtype} | {each.mean:.4f} | {each.spread:.4f} | {change} | {each.moments_bytes:,} |"
        )
    return "\n".join(lines)


def missed(found: list[Quality]) -> list[str]:
    """What is further from fp32 than the bound."""
    return [each.state_dtype for each in found if abs(each.mean / found[0].mean - 1) > BOUND]


def result(options: argparse.Namespace, found: list[Quality]) -> dict[str, Any]:
    command = f"python -m bench.moments --steps {options.steps} --seeds {options.seeds}"
    return {**facts(command), "ranks": 2, "state_dtypes": [asdict(each) for each in found]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... (default: 3)")
    parser.add_argument("--json", type=Path, help="also write every number there")
    options = parser.parse_args()
    found = []
    for state_dtype in STATE_DTYPES:
        runs = [train(state_dtype, seed, options.steps) for seed in range(options.seeds)]
        found.append(Quality(state_dtype, [loss for loss, _ in runs], runs[0][1]))
        print(f"{state_dtype}: {found[-1].losses}", flush=True)
    print(f"\n{table(found)}")
    if options.json:
        options.json.write_text(json.dumps(result(options, found), indent=1) + "\n")
    if bad := missed(found):
        print(f"further than {BOUND:.1%} from fp32 moments: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
