"""A script that imports torch, which takes seconds, and forks a program for each line of JSON that it reads.

Python's own fork servers end their children without atexit and without taking modules down. Here a fork comes back to
the top of the interpreter, and its program's end is that of any program. See tests/programs.py.
"""

import json
import os
import selectors
import signal
import sys
from types import CodeType
from typing import Any

import torch  # noqa: F401


def serve() -> dict[str, Any]:
    """Returns in each child, with what its line said; the server itself ends with its stdin. Writes "started PID" and
    "ended PID CODE"."""
    wakes, woken = os.pipe()
    for each in (wakes, woken):
        os.set_blocking(each, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        asked = None
        while asked is None:
            for key, _ in selector.select():
                if key.fd == wakes:
                    os.read(wakes, 1 << 12)
                    tell_ended()
                elif (asked := start(read_line())) is not None:
                    break
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(wakes)
    os.close(woken)
    return asked


def tell_ended() -> None:
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            os.write(1, f"ended {ended[0]} {os.waitstatus_to_exitcode(ended[1])}\n".encode())
    except ChildProcessError:
        pass  # there is no child


def read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (part := os.read(0, 1)):
            os._exit(0)
        line += part
    return bytes(line)


def start(line: bytes) -> dict[str, Any] | None:
    if child := os.fork():
        os.write(1, f"started {child}\n".encode())
        return None
    return dict(json.loads(line))


def become(asked: dict[str, Any]) -> CodeType:
    """This process has the program's files, environment and arguments from now on. Returns its code."""
    for number, name in enumerate([os.devnull, asked["out"], asked["err"]]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    with open(sys.argv[0]) as file:
        return compile(file.read(), sys.argv[0], "exec")


if __name__ == "__main__":
    program = become(serve())
    __file__ = sys.argv[0]
    exec(program)
