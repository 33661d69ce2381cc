"""The error that ends the script of one rank, told to the others: else they see only that the rank is gone."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref

from zerox._C import FailureDetector
from zerox.ranks.roll_call import summary_of

MOST_S = 2.0  # the store may be gone, which takes a second to find out, for each optimizer


class LastWords:
    """At the end of a process that an exception ended, all FailureDetector get a failure record with it.

    Python keeps such an exception in ``sys.last_value`` before it runs what atexit has. What ``sys.exit()``, a signal
    or ``os._exit()`` ends leaves nothing, nor does a prompt, whose errors end nothing.
    """

    def __init__(self) -> None:
        self.rank_of: weakref.WeakKeyDictionary[FailureDetector, int] = weakref.WeakKeyDictionary()
        self.process = 0

    def listen(self, failure_detector: FailureDetector, rank: int) -> None:
        if self.process != os.getpid():  # the first here; a forked child says nothing in its parent's name
            self.process = os.getpid()
            self.rank_of.clear()
            atexit.register(self.say)
        self.rank_of[failure_detector] = rank

    def say(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or hasattr(sys, "ps1") or self.process != os.getpid():
            return
        deadline = time.monotonic() + MOST_S
        for failure_detector, rank in list(self.rank_of.items()):
            if time.monotonic() < deadline:
                failure_detector.leave(f"rank {rank} raised {summary_of(error)}")


last_words = LastWords()
