"""Runs the examples as a user does, in processes that have imported torch before."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests import forked

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SMALLEST = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--device=cpu"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def run(
    *arguments: object, within: list[str] | None = None, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """train_gpt.py. ``within``: this command starts the process, which imports torch itself. Else as run_script()."""
    options = list(map(str, arguments))
    if within is None:
        return run_script(EXAMPLE.name, *options, ranks=ranks)
    command = [*within, sys.executable, str(EXAMPLE), *options]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, timeout=forked.MOST_SECONDS
    )


def run_script(name: str, *arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    """In a process that is forked from one that has imported torch, which takes longer than most of these trainings.

    The example's own option starts ranks under torchrun. ``ranks``: so many are forked, with what torchrun would tell
    each; the output is rank 0's, or that of a rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank, facts in enumerate(_facts(ranks)):
            (output := Path(folder, str(rank))).mkdir()
            script = str(EXAMPLE.with_name(name))
            started.append((forked.start(_main, script, list(arguments), facts, output=output), output))
        ended = [forked.end(*each) for each in started]
    return next((each for each in ended if each.returncode), ended[0])


def assert_refused_in_one_line(name: str, arguments: str, reason: str) -> None:
    ended = run_script(name, *arguments.split())
    assert ended.returncode == 2
    assert ended.stderr == f"{name}: error: {reason}\n"


def _facts(ranks: int | None) -> list[dict[str, str]]:
    """What each rank finds in its environment."""
    if ranks is None:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(ranks)
    ]


def _main(script: str, options: list[str], facts: dict[str, str]) -> None:
    os.environ.update(ENVIRONMENT | facts)
    torch.set_num_threads(1)
    sys.argv = [script, *options]
    sys.path.insert(0, str(EXAMPLE.parent))  # as of a script
    runpy.run_path(script, run_name="__main__")
