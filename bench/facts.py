"""What every result file says of where it comes from, so that somebody else can make it again."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The commit that ran, with -dirty where files that git tracks differ from it, other than results themselves."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor()


def write_result(
    path: Path, module: str, argv: list[str] | None, rows: list[dict[str, Any]], more: dict[str, Any] | None = None
) -> None:
    """What ``python -m module argv`` (None: this process' own) has found, with its facts and ``more``, as JSON."""
    command = " ".join([f"python -m {module}", *(argv if argv is not None else sys.argv[1:])])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts(command), **(more or {}), "rows": rows}, indent=1) + "\n")


def facts(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": commit(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
