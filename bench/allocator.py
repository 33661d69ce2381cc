"""Reports of torch's CPU allocator, of all threads: the profiler sees only those that autograd knows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.common import ROOT, library

build = partial(library, ROOT / "bench/counting_allocator.cpp", ("-O1",))  # call it before ranks do


class Allocator:
    """Counts from its construction on, for the life of the process: what was there before is not in its numbers."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in ("bytes_now", "take_peak"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.library.start_counting()

    @property
    def now(self) -> int:
        return int(self.library.bytes_now())

    def peak_of(self, function: Callable[[], object]) -> int:
        """The most bytes that were allocated at a time while ``function`` ran."""
        self.library.take_peak()
        function()
        return int(self.library.take_peak())
