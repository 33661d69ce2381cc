"""Runs every benchmark of this machine's CPU, and leaves numbers and pictures in a folder.

    python -m bench [--out bench/results/cpu] [--quick]

One after the other, each by a command of its own that it prints, and that can be run alone. Nothing else should run
beside them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from bench.common import ROOT

SMALL = "--layers 1 --seconds 1"
# name -> what is run, and what makes it quick.
RUNS = {
    "step": ("bench.step --ranks 2 4 --batch 1 --seconds 360", SMALL),
    "step-larger-batch": ("bench.step --ranks 2 --batch 2 --seconds 180", SMALL),
    "step-bf16-clip": ("bench.step --ranks 2 --batch 1 --dtype bf16 --clip --seconds 180", SMALL),
    "step-stages": (
        "bench.step --ranks 2 4 --batch 1 --seconds 150 --systems 'DDP + AdamW' 'stage 2' ', resharded' 'stage 3'",
        SMALL,
    ),
    "step-alone": ("bench.step --ranks 1 --batch 1 --seconds 60", SMALL),
    "buckets": ("bench.step --ranks 2 4 --systems fused stage --caps 1 4 16 64 --batch 1 --seconds 240", SMALL),
    "step-torchs-calls": (
        """bench.step --ranks 2 --seconds 200 --systems "own clip" "torch's clip" """,
        SMALL,
    ),
    "wrapper": (
        "bench.wrapper --ranks 2 --seconds 90",
        f"{SMALL} --rounds 5 --looked-at-mib 1 --backend eager",
    ),
    "memory": ("bench.memory --ranks 2 4", "--layers 1"),
    "residency": ("bench.residency --ranks 2 4 --seconds 200", SMALL),
    "host": ("bench.host --ranks 1 2", "--rounds 10"),
    "streams": ("bench.streams --ranks 2 --batch 1", "--layers 1"),
    "checkpoint": ("bench.checkpoint", "--layers 1 --rounds 1"),
    "kernels": ("bench.kernels", "--quick --seconds 1"),
}
DRAWN = ("residency", "streams")


def command(name: str, out: Path, quick: bool) -> list[str]:
    full, hasty = RUNS[name]
    files = ["--json", str(out / f"{name}.json")]
    files += ["--png", str(out / f"{name}.png")] if name in DRAWN else []
    return [sys.executable, "-m", *shlex.split(full), *(hasty.split() if quick else []), *files]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"), help="folder (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="default: all")
    parser.add_argument(
        "--quick", action="store_true", help="small and short: whether it works, and no numbers to quote"
    )
    args = parser.parse_args(argv)
    failed = []
    for name in args.only:
        run = command(name, args.out, args.quick)
        print(f"\n$ python {shlex.join(run[1:])}", flush=True)
        start = time.monotonic()
        if subprocess.run(run, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
