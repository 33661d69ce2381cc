"""Runs examples/train_gpt.py as a user does, in processes that have imported torch before."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.mortal_ranks import FORKSERVER

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SMALLEST = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--device=cpu"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
MOST_SECONDS = 240


def run(*arguments: object, within: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """The example in a process of its own; ``within``: this command starts the process, which imports torch itself.

    Else it is forked from one that has imported torch, which takes longer than most of these trainings. torchrun starts
    the ranks of ``--ranks`` in either case.
    """
    options = list(map(str, arguments))
    if within:
        command = [*within, sys.executable, str(EXAMPLE), *options]
        environment = os.environ | ENVIRONMENT
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=MOST_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = FORKSERVER.Process(target=_main, args=(options, str(out), str(err)))
        process.start()
        process.join(MOST_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        said = out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
    return subprocess.CompletedProcess(options, process.exitcode or 0, *said)


def _main(options: list[str], out: str, err: str) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    sys.argv = [str(EXAMPLE), *options]
    sys.path.insert(0, str(EXAMPLE.parent))  # as of a script
    runpy.run_path(str(EXAMPLE), run_name="__main__")
