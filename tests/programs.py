"""Ranks as programs of their own, each with an interpreter that ends as a user's does.

They are forked from one that has imported torch and nothing else (fork_server.py), which takes longer than most of what
they do. A fork runs its program at the top of the interpreter, so all that follows is Python's own: threads are joined,
what is registered with atexit is called, modules are taken down, and the exit code is that of the program.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("fork_server.py")


class ForkServer:
    """The process that all programs are forked from: they are each other's siblings, as those of one launcher."""

    def __init__(self) -> None:
        command = [sys.executable, str(SERVER)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=_environment()
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.asks, self.hears = self.process.stdin, self.process.stdout
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.hears, selectors.EVENT_READ)
        self.ended: dict[int, int] = {}
        atexit.register(self.process.kill)

    def start(self, script: Path, args: list[str], out: Path, err: Path) -> int:
        said = json.dumps(
            {"argv": [str(script), *args], "environment": _environment(), "out": str(out), "err": str(err)}
        )
        self.asks.write(f"{said}\n".encode())
        self.asks.flush()
        while (child := self._hear(60.0)) is None:
            pass
        return child

    def _hear(self, within_s: float) -> int | None:
        """The number of a program that was started; None if one has ended, or nothing is said in time."""
        if not self.selector.select(within_s):
            return None
        line = bytearray()
        while not line.endswith(b"\n"):
            part = os.read(self.hears.fileno(), 1)
            assert part, "the process that forks programs has ended"
            line += part
        what, child, *code = line.split()
        if what == b"started":
            return int(child)
        self.ended[int(child)] = int(code[0])
        return None

    def exit_code(self, child: int, within_s: float) -> int:
        """TimeoutError if it has not ended in time."""
        deadline = time.monotonic() + within_s
        while child not in self.ended:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"program {child} has not ended within {within_s} s")
            self._hear(left)
        return self.ended.pop(child)

    def kill(self, child: int) -> None:
        if child not in self.ended:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(child, signal.SIGKILL)
            self.exit_code(child, 60.0)
        self.ended.pop(child, None)


class Program:
    """What tests of signals use of subprocess.Popen."""

    def __init__(self, script: Path, args: list[str]) -> None:
        self.said = script.with_name(f"stderr of {args[0]}")
        self.said.touch()
        self.pid = fork_server().start(script, args, Path(os.devnull), self.said)
        self.returncode: int | None = None

    def lines(self, within_s: float) -> Iterator[str]:
        """Of its stderr, as they come."""
        deadline, begun = time.monotonic() + within_s, ""
        with self.said.open() as file:
            while time.monotonic() < deadline:
                *whole, begun = (begun + file.read()).split("\n")
                yield from whole
                time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, within_s: float) -> None:
        self.returncode = fork_server().exit_code(self.pid, within_s)

    def close(self) -> None:
        if self.returncode is None:
            fork_server().kill(self.pid)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer()


def run_programs(
    source: str, folder: Path, *args: str, world_size: int = 2, within_s: float = 240, forked: bool = True
) -> list[str]:
    """Runs ``source`` with the arguments RANK, STORE (a path for file://) and ``args``; returns each rank's output.

    AssertionError, with what a rank said, unless all end with exit code 0. Not ``forked``: each imports torch itself,
    as one must that is to come before torch.
    """
    script = folder / "rank.py"
    script.write_text(source)
    asked = [[str(rank), str(folder / "store"), *args] for rank in range(world_size)]
    if not forked:
        return _run_anew(script, asked, within_s)
    ended = run_all(script, asked, within_s)
    for rank in ended:
        assert rank.returncode == 0, f"exit code {rank.returncode}: {rank.stderr}"
    return [rank.stdout for rank in ended]


def run_all(script: Path, asked: list[list[str]], within_s: float = 240) -> list[subprocess.CompletedProcess[str]]:
    """Side by side, with the arguments in ``asked``. TimeoutError unless all end."""
    paths = [(script.with_name(f"out of {n}"), script.with_name(f"err of {n}")) for n in range(len(asked))]
    for path in (path for pair in paths for path in pair):
        path.unlink(missing_ok=True)
    programs = [fork_server().start(script, each, *pair) for each, pair in zip(asked, paths, strict=True)]
    left, ended = list(programs), []
    try:
        for program, args, (out, err) in zip(programs, asked, paths, strict=True):
            code = fork_server().exit_code(program, within_s)
            left.remove(program)
            ended.append(subprocess.CompletedProcess(args, code, out.read_text(), err.read_text()))
    finally:
        for program in left:
            fork_server().kill(program)
    return ended


def _run_anew(script: Path, asked: list[list[str]], within_s: float) -> list[str]:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for args in asked
    ]
    printed = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=within_s)
            assert rank.returncode == 0, errors
            printed.append(output)
    finally:
        for rank in ranks:
            rank.kill()
    return printed
