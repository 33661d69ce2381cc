"""Instructions that all threads of this process execute, where Linux' perf is installed and the machine counts them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import wait

INSTRUCTIONS = "instructions:u"
PATIENCE_S = 10.0


def instructions_of(function: Callable[[], object], event: str = INSTRUCTIONS) -> float | None:
    """Runs ``function``; how many ``event`` perf counted meanwhile, or None where it can't."""
    perf = _Perf.start(event)
    if perf is None:
        function()
        return None
    function()
    return perf.stop()


class _Perf:
    """One that waits for the word to count, so that its own start is in no number."""

    def __init__(self, process: subprocess.Popen[str], words: int, answers: int) -> None:
        self.process, self.words, self.answers = process, words, answers

    @staticmethod
    def start(event: str) -> _Perf | None:
        if shutil.which("perf") is None:
            return None
        (control, words), (answers, told) = os.pipe(), os.pipe()
        command = ["perf", "stat", "-x,", "-e", event, "--delay", "-1", f"--control=fd:{control},{told}"]
        process = subprocess.Popen(
            [*command, "-p", str(os.getpid())],
            pass_fds=(control, told),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(control)
        os.close(told)
        made = _Perf(process, words, answers)
        if made.say("enable"):
            return made
        made.stop()
        return None

    def say(self, word: str) -> bool:
        """Whether perf has done it."""
        try:
            os.write(self.words, f"{word}\n".encode())
        except BrokenPipeError:
            return False
        heard = wait([self.answers], PATIENCE_S)  # not select(): it takes no descriptor above 1,023
        return bool(heard) and os.read(self.answers, 64).startswith(b"ack")

    def stop(self) -> float | None:
        self.say("disable")
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=PATIENCE_S)
        os.close(self.words)
        os.close(self.answers)
        return count_in(said)


def count_in(said: str) -> float | None:
    """The first field of the line that has several; None for "<not supported>" and where there is none."""
    for line in said.splitlines():
        first, *others = line.split(",")
        if others:
            return float(first) if first.replace(".", "", 1).isdigit() else None
    return None
