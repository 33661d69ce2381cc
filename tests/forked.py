"""Programs in processes that are forked from one that has imported torch, which takes longer than most of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.mortal_ranks import FORKSERVER

MOST_SECONDS = 240


def run(
    body: Callable[..., Any], *args: Any, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """``body(*args)`` as a program that starts in a folder, and has this environment and nothing else of it."""
    with tempfile.TemporaryDirectory() as output:
        return end(start(_alone, body, args, str(folder), dict(environment), output=Path(output)), Path(output))


def start(body: Callable[..., Any], *args: Any, output: Path) -> BaseProcess:
    """``body(*args)`` is importable; what it writes goes into the folder ``output``."""
    process = FORKSERVER.Process(target=_main, args=(body, args, str(output)))
    process.start()
    return process


def end(process: BaseProcess, output: Path) -> subprocess.CompletedProcess[str]:
    process.join(MOST_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    said = [Path(output, name).read_text(encoding="utf-8") for name in ("out", "err")]
    return subprocess.CompletedProcess([], process.exitcode or 0, *said)


def _main(body: Callable[..., Any], args: tuple[Any, ...], output: str) -> None:
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(Path(output, name), "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    body(*args)


def _alone(body: Callable[..., Any], args: tuple[Any, ...], folder: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # asked for again
    body(*args)
