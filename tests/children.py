"""Forked children for tests: the value that one returned, or word that it had to be killed."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

MOST_SECONDS = 30.0
KILLED = "the child had to be killed"


def in_a_child(body: Callable[[], Any], fork: Callable[[], int] = os.fork) -> Any:
    """The result of ``body()`` in a forked child, its traceback if it raised, or KILLED if it took too long."""
    reads, writes = os.pipe()
    child = fork()
    if child == 0:
        try:
            answer = pickle.dumps(body())
        except BaseException:
            answer = pickle.dumps(traceback.format_exc())
        try:
            with os.fdopen(writes, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writes)
    deadline, answer = time.monotonic() + MOST_SECONDS, b""
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        while wait([pipe], max(0.0, deadline - time.monotonic())):
            part = pipe.read(1 << 16)
            if not part:
                ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                return pickle.loads(answer) if answer else f"the child died: {ended}"
            answer += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return KILLED
