"""The ceiling of an update on the CPU: a loop that moves as many bytes in the same shape, and computes nothing.

An update reads four arrays and writes three of them in place. What memory gives such a loop depends on its shape, so a
copy's rate is no ceiling for it. The loop has fp32 arrays of its own, which start on different pages: where streams
cross into new pages together, they wait together.
"""

from __future__ import annotations

import ctypes

import torch

from bench.common import ROOT, library
from bench.timing import Call

BYTES_AN_ELEMENT = 4 * 4 + 3 * 4
STAGGER = 8192 // 4  # elements between the starts of neighbours, modulo more than that
PAGE = 4096
PERIOD = 16 * PAGE


class Stream:
    """Moves ``nbytes`` with each call. Raises OSError or CalledProcessError where it can't be compiled."""

    def __init__(self, nbytes: int) -> None:
        flags = ("-O3", "-march=native", "-fopenmp")
        self.function = ctypes.CDLL(str(library(ROOT / "bench/stream_ceiling.cpp", flags, ("-lc10", "-ltorch_cpu"))))
        self.numel = nbytes // BYTES_AN_ELEMENT
        room = self.numel + 4 * STAGGER + PERIOD // 4
        self.rooms = [torch.zeros(room) for _ in range(4)]
        starts = [-(-each.data_ptr() // PERIOD) * PERIOD + place * STAGGER * 4 for place, each in enumerate(self.rooms)]
        self.arguments = [*(ctypes.c_void_p(start) for start in starts), ctypes.c_int64(self.numel)]

    def __call__(self) -> None:
        self.function.adam_shaped_stream(*self.arguments)


def stream_call(nbytes: int, num_sets: int) -> Call:
    streams = [Stream(nbytes) for _ in range(num_sets)]
    return lambda i: streams[i]()
