"""Reports of torch's CPU allocator, of all threads: the profiler sees only those that autograd knows."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "bench/counting_allocator.cpp"


@functools.cache
def build() -> Path:
    """The library, compiled where its source or torch has changed. Call it before ranks do."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = ROOT / "build" / f"counting-allocator-{key}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
        flags = [
            "-O1",
            "-std=c++20",
            "-fPIC",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        linked = [f"-L{folder}" for folder in cpp_extension.library_paths()] + ["-lc10"]
        compiler = cpp_extension.get_cxx_compiler()
        subprocess.run([compiler, *flags, *includes, str(SOURCE), "-o", str(made), *linked], check=True)
        made.replace(library)
    return library


class Allocator:
    """Counts from its construction on, for the life of the process: what was there before is not in its numbers."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in ("bytes_now", "bytes_peak"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.library.start_counting()

    @property
    def now(self) -> int:
        return int(self.library.bytes_now())

    def peak_of(self, function: Callable[[], object]) -> int:
        """The most bytes that were allocated at a time while ``function`` ran."""
        self.library.reset_peak()
        function()
        return int(self.library.bytes_peak())
