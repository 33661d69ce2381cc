"""Holds this checkout of zerox against another commit of it: times, memory and counts of a training step.

    python -m bench.against COMMIT [--pairs 20] [--ranks 1 2] [--json FILE]

COMMIT is built in a git worktree below build/against. Each sample has processes of its own, as the extension can be
loaded once in a process; they take turns: here, COMMIT, here again. "ratio" is the median over the pairs of this
checkout over COMMIT, "same" that of this checkout over itself, each with the middle half of its pairs. PASS: the
ratio is at most 1.02, or what that middle half of "same" shows in either direction. The work is in files of this
checkout on both sides. Counts (allocations, copies, messages, bytes) don't depend on what else the machine does; times
need it quiet.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import allocator
from bench.against_work import Work, as_argument
from bench.common import ROOT, Row, new_parser, parse, print_rows, write_result

FOLDER = ROOT / "build/against"
ALLOWED = 1.02
HERE, THERE, AGAIN = "here", "there", "here again"

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


def samples_in_turn(sides: dict[str, Checkout], works: Sequence[Work], pairs: int) -> list[dict[str, Sample]]:
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
        print(f"pair {index + 1} of {pairs}: {time.monotonic() - start:.0f} s", flush=True)
    return found


def rows_of(found: Sequence[dict[str, Sample]]) -> list[Row]:
    """Of what every side could measure each time."""
    sides = [side for pair in found for side in pair.values()]
    return [row_of(key, found) for key in sides[0] if all(key in side for side in sides)]


def row_of(key: tuple[int, str, str], found: Sequence[dict[str, Sample]]) -> Row:
    ranks, stage, what = key
    here, there, again = ([pair[side][key] for pair in found] for side in (HERE, THERE, AGAIN))
    ratios, same = ratio(here, there), ratio(again, here)
    low, middle, high = quartiles(ratios)
    same_low, same_middle, same_high = quartiles(same)
    passes = middle <= max(ALLOWED, same_high, 1 / same_low if same_low > 0 else ALLOWED)
    row: Row = {"ranks": ranks, "stage": stage, "what": what, "passes": passes}
    row |= {"here": statistics.median(here), "there": statistics.median(there)}
    row |= {"ratio": middle, "low": low, "high": high}
    return row | {"same": same_middle, "same_low": same_low, "same_high": same_high}


def ratio(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Pair by pair; 1 where there is nothing on both sides."""
    return [1.0 if a == b else a / b if b else float("inf") for a, b in zip(over, under, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


COLUMNS = {"ranks": "", "stage": "<7", "what": "<13", "here": ",.1f", "there": ",.1f", "ratio": ".3f", "low": ".3f"}
COLUMNS |= {"high": ".3f", "same": ".3f", "same_low": ".3f", "same_high": ".3f", "passes": "<6"}


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.against", __doc__, picture=False)
    parser.add_argument("commit", metavar="COMMIT", help="whatever git takes for one")
    parser.add_argument("--pairs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument("--steps", type=int, default=Work.steps, help="timed in each process (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of width 512 (default: %(default)s)")
    args = parse(parser, argv)
    there = built(args.commit)
    here = Checkout.of(ROOT / "zerox", "here")
    library = str(allocator.build())
    training = replace(Work(1, "", "").training, layers=args.layers)
    works = [Work(ranks, "", library, steps=args.steps, training=training) for ranks in args.ranks]
    sides = {HERE: here, THERE: there, AGAIN: here}
    rows = rows_of(samples_in_turn(sides, works, args.pairs))
    shown = [{**row, "passes": "PASS" if row["passes"] else "more than the same commit shows"} for row in rows]
    print_rows(shown, COLUMNS, header=True)
    more = {"against": there.path.name.removeprefix("only-"), "pairs": args.pairs}
    write_result(args.json, "bench.against", argv, rows, more)
    failed = [row for row in rows if not row["passes"]]
    more_than = f"{len(failed)} of {len(rows)} numbers are larger than at {args.commit}"
    print(more_than if failed else f"PASS: {len(rows)} numbers")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
