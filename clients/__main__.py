"""Runs other people's scripts with two changed lines, beside the scripts as they are.

    python -m clients SCRIPTS [name ...] [--stages 1 2 3] [--json FILE]
    python -m clients SCRIPTS [name ...] --resume

The second saves by each script's own code, and goes on from there. SCRIPTS is a folder with their repositories, at the
commits that ``--list`` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import commit
from clients.client import Client, Misfit, clients
from clients.launch import Failed, Result, run
from clients.report import differences, table, table_of_resumed
from clients.resumed import resumed

DEFAULT_STAGES = (1, 2, 3)


def compared(client: Client, scripts: Path, stages: Sequence[int], folder: Path) -> dict[str, Any]:
    """What the changed script's numbers differ by from the unchanged one's, and those of each planted fault."""
    plain = client.copied(scripts, folder / "plain", is_changed=False)
    changed = client.copied(scripts, folder / "changed", is_changed=True)
    print(f"{client.name}: as it is", flush=True)
    base = run(client, plain, folder / "ddp")
    row: dict[str, Any] = {
        "name": client.name,
        "repository": client.repository,
        "commit": client.commit,
        "changed lines": client.num_changed,
        "steps": base.num_steps,
        "evaluations": sum(map(len, base.evaluations)),
        "allowed": client.most,
        "same bits": client.same_bits,
        "stages": {},
        "faults": {},
    }
    for stage in stages:
        print(f"{client.name}: stage {stage}", flush=True)
        row["stages"][stage] = _attempt(client, changed, folder / f"stage{stage}", base, stage=stage)
    for fault in client.faults:
        print(f"{client.name}: fault '{fault}'", flush=True)
        row["faults"][fault] = _attempt(client, plain, folder / f"fault-{fault}", base, fault=fault)
    return row


def _attempt(client: Client, where: Path, out: Path, base: Result, **how: Any) -> dict[str, Any]:
    try:
        return differences(base, run(client, where, out, num_backwards=base.num_backwards, **how))
    except Failed as failed:
        return {"failed": str(failed)}


def main(argv: list[str] | None = None) -> int:
    known = clients()
    parser = argparse.ArgumentParser(
        prog="python -m clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", type=Path, nargs="?", help="folder with the repositories")
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--stages", type=int, nargs="+", choices=DEFAULT_STAGES, default=DEFAULT_STAGES)
    parser.add_argument("--json", type=Path, help="results are written there too, beside those that it has of others")
    parser.add_argument("--keep", type=Path, help="folder for what the runs leave (default: a temporary one)")
    parser.add_argument("--resume", action="store_true", help="save and go on, with those that save an optimizer")
    parser.add_argument("--list", action="store_true", help="print repositories and commits, and end")
    args = parser.parse_args(argv)
    if args.list or args.scripts is None:
        for client in known.values():
            print(f"{client.name:20} https://github.com/{client.repository} {client.commit}")
        return 0 if args.list else 2
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no client {unknown[0]!r}: there are {', '.join(known)}")
    if unable := [name for name in args.names if args.resume and known[name].resume is None]:
        parser.error(f"{unable[0]} saves no optimizer")
    rows, misfits = [], 0
    compare = resumed if args.resume else compared
    for name in args.names or [name for name, client in known.items() if client.resume or not args.resume]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(args.keep or temporary).absolute() / name
            try:
                rows.append(compare(known[name], args.scripts.absolute(), args.stages, folder))
            except (Misfit, Failed) as error:
                misfits += 1
                print(f"{name}: {error}", file=sys.stderr)
        if args.json:
            _write(args.json, rows)
    text, num_failed = (table_of_resumed if args.resume else table)(rows)
    print(text)
    return int(bool(num_failed or misfits))


def _write(to: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows of scripts that were not run now stay."""
    before = json.loads(to.read_text())["rows"] if to.exists() else []
    for row in rows:
        row["made by"] = _made_by()
    merged = {row["name"]: row for row in [*before, *rows]}
    to.write_text(json.dumps({"rows": [merged[name] for name in sorted(merged)]}, indent=1) + "\n")


def _made_by() -> dict[str, str]:
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"commit": commit("clients/*.json"), "torch": torch.__version__, "machine": machine}


if __name__ == "__main__":
    sys.exit(main())
