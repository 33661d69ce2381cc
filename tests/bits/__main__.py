"""Records the bits of many trainings, or compares them with those that another commit recorded.

    python -m tests.bits record [FILE]
    python -m tests.bits compare [FILE] [--only TEXT]

For moving code about. The trainings' gradients are products of elements, so that FILE, tests/bits/recorded.json as it
is, may come from another machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import facts
from tests.bits.recording import cases, train_all
from tests.ranks import run_ranks

RECORDED = Path(__file__).with_name("recorded.json")


def found_here(only: str = "") -> dict[str, Any]:
    """What each rank of each training comes to, by the training's name."""
    asked = {name_of(*case): case for case in cases()}
    asked = {name: case for name, case in asked.items() if only in name}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in sorted({case[0] for case in asked.values()}):
            names = [name for name, case in asked.items() if case[0] == world_size]
            by_rank = run_ranks(train_all, world_size, [asked[name][1:] for name in names], folder, timeout_s=600)
            found |= {name: list(told) for name, told in zip(names, zip(*by_rank, strict=True), strict=True)}
    return {name: found[name] for name in asked}


def name_of(world_size: int, stage: int, kind: str, way: str) -> str:
    return f"{world_size} ranks, stage {stage}, {kind}, {way}"


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name}\n  then {then.get(name)}\n  now  {now.get(name)}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path, nargs="?", default=RECORDED)
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    args = parser.parse_args(argv)
    found = found_here(args.only)
    if args.what == "record":
        if raised := [f"{name}: {told}" for name, told in found.items() if any(isinstance(each, str) for each in told)]:
            print(*raised, sep="\n")
            return 1
        args.file.write_text(json.dumps({**facts("python -m tests.bits"), "trainings": found}, indent=0) + "\n")
        print(f"{len(found)} trainings")
        return 0
    before = json.loads(args.file.read_text())
    then = {name: told for name, told in before["trainings"].items() if args.only in name}
    differ = differences(then, found)
    print(*differ, f"{len(found) - len(differ)} of {len(found)} are as recorded at {before['commit']}", sep="\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
