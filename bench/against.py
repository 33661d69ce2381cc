"""Holds this checkout of zerox against another commit of it: times, memory and counts of a training step.

    python -m bench.against COMMIT [--pairs 20] [--ranks 1 2] [--json FILE]

COMMIT is built in a git worktree below build/against. Each sample has processes of its own, as the extension can be
loaded once in a process; they take turns: here, COMMIT, here again. "ratio" is the median over the pairs of this
checkout over COMMIT, "same" that of this checkout over itself, each with the middle half of its pairs. PASS: the
ratio is at most 1.02, or what that middle half of "same" shows in either direction. The work is in files of this
checkout on both sides. Counts (allocations, copies, messages, bytes, and instructions where perf can count them) don't
depend on what else the machine does; times need it quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import allocator
from bench.against_work import Work, as_argument
from bench.facts import ROOT, write_result

FOLDER = ROOT / "build/against"
ALLOWED = 1.02
HERE, THERE, AGAIN = "here", "there", "here again"

Row = dict[str, Any]
Sample = dict[tuple[int, str, str], float]  # (ranks, stage, what) -> value


@dataclass(frozen=True)
class Checkout:
    """A folder that has nothing but a link to a zerox, and so decides which one is imported there."""

    path: Path

    @staticmethod
    def of(zerox: Path, name: str) -> Checkout:
        folder = FOLDER / f"only-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "zerox"
        link.unlink(missing_ok=True)
        link.symlink_to(zerox)
        return Checkout(folder)

    def run(self, work: Work) -> dict[str, dict[str, float]]:
        """By stage. Raises CalledProcessError."""
        told = as_argument(replace(work, zerox=str(self.path / "zerox")))
        paths = os.pathsep.join([str(self.path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.against_work", told]
        done = subprocess.run(command, cwd=self.path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
        return found


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def built(commit: str) -> Checkout:
    """That commit, built once."""
    name = git("rev-parse", "--short=12", f"{commit}^{{commit}}")
    tree = FOLDER / name
    if not tree.exists():
        git("worktree", "prune")
        git("worktree", "add", "--quiet", "--detach", str(tree), name)
    if not list(tree.glob("zerox/_C*.so")):
        print(f"building {name} in {tree}, a few minutes", flush=True)
        environment = os.environ | {"ZEROX_CUDA": "0"}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=tree, env=environment, check=True)
    return Checkout.of(tree / "zerox", name)


def samples_in_turn(
    sides: dict[str, Checkout], works: Sequence[Work], pairs: int, said: Callable[[str], None]
) -> list[dict[str, Sample]]:
    """For each pair: side -> what it measured."""
    order, found = list(sides), []
    for index in range(pairs):
        start = time.monotonic()
        pair: dict[str, Sample] = {name: {} for name in sides}
        for work in works:
            for name in order:
                for stage, numbers in sides[name].run(work).items():
                    pair[name] |= {(work.ranks, stage, what): value for what, value in numbers.items()}
        order.append(order.pop(0))  # nobody is always behind the same one
        found.append(pair)
        said(f"pair {index + 1} of {pairs}: {time.monotonic() - start:.0f} s")
    return found


def rows_of(found: Sequence[dict[str, Sample]]) -> list[Row]:
    """Of what every side could measure each time."""
    sides = [side for pair in found for side in pair.values()]
    return [row_of(key, found) for key in sides[0] if all(key in side for side in sides)]


def row_of(key: tuple[int, str, str], found: Sequence[dict[str, Sample]]) -> Row:
    ranks, stage, what = key
    here, there, again = ([pair[side][key] for pair in found] for side in (HERE, THERE, AGAIN))
    ratios, same = ratio(here, there), ratio(again, here)
    low, middle, high = quartiles(same)
    return {
        "ranks": ranks,
        "stage": stage,
        "what": what,
        "here": statistics.median(here),
        "there": statistics.median(there),
        "ratio": quartiles(ratios)[1],
        "ratio_spread": quartiles(ratios)[::2],
        "same": middle,
        "same_spread": (low, high),
        "passes": quartiles(ratios)[1] <= max(ALLOWED, high, 1 / low if low > 0 else ALLOWED),
    }


def ratio(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Pair by pair; 1 where there is nothing on both sides."""
    return [1.0 if a == b else a / b if b else float("inf") for a, b in zip(over, under, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


HEADER = (
    f"{'ranks':>5}  {'stage':<7}  {'what':<14}  {'here':>14}  {'COMMIT':>14}  "
    f"{'ratio':>6}  {'middle half':>15}  {'same':>6}  {'middle half':>15}"
)


def line(row: Row) -> str:
    halves = [f"{row[key][0]:.3f} to {row[key][1]:.3f}" for key in ("ratio_spread", "same_spread")]
    return (
        f"{row['ranks']:>5}  {row['stage']:<7}  {row['what']:<14}  {row['here']:>14,.1f}  {row['there']:>14,.1f}  "
        f"{row['ratio']:>6.3f}  {halves[0]:>15}  {row['same']:>6.3f}  {halves[1]:>15}  "
        f"{'PASS' if row['passes'] else 'more than the same commit shows'}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.against", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT", help="whatever git takes for one")
    parser.add_argument("--pairs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument("--steps", type=int, default=Work.steps, help="timed in each process (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of width 512 (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args(argv)
    if min(args.pairs, args.steps, args.layers, *args.ranks) < 1:
        parser.error("--pairs, --ranks, --steps and --layers take numbers from 1 on")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    there = built(args.commit)
    here = Checkout.of(ROOT / "zerox", "here")
    library = str(allocator.build())
    works = [Work(ranks=ranks, zerox="", allocator=library, steps=args.steps) for ranks in args.ranks]
    works = [replace(work, training=replace(work.training, layers=args.layers)) for work in works]
    sides = {HERE: here, THERE: there, AGAIN: here}
    found = samples_in_turn(sides, works, args.pairs, lambda text: print(text, flush=True))
    rows = rows_of(found)
    print("\n".join([HEADER, *map(line, rows)]), flush=True)
    if args.json:
        more = {"against": there.path.name.removeprefix("only-"), "pairs": args.pairs}
        write_result(args.json, "bench.against", argv, rows, more)
    failed = [row for row in rows if not row["passes"]]
    more_than = f"{len(failed)} of {len(rows)} numbers are larger than at {args.commit}"
    print(more_than if failed else f"PASS: {len(rows)} numbers")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
