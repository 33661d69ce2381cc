"""C++ that benchmarks bring along, compiled where its source or torch has changed."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]


@functools.cache
def library(source: Path, flags: Sequence[str] = (), linked: Sequence[str] = ("-lc10",)) -> Path:
    """A library for ctypes. ``flags`` and ``linked`` are tuples: of the compiler, and of the linker in torch's folder.

    Call it before ranks do. Raises OSError or CalledProcessError where there is no compiler, or it finds an error.
    """
    key = hashlib.sha256(" ".join([*flags, *linked, torch.__version__]).encode() + source.read_bytes()).hexdigest()[:16]
    found = ROOT / "build" / f"{source.stem.replace('_', '-')}-{key}.so"
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        made = found.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command = [cpp_extension.get_cxx_compiler(), "-std=c++20", "-fPIC", "-shared", abi, *flags]
        command += [*(f"-I{folder}" for folder in cpp_extension.include_paths()), str(source), "-o", str(made)]
        command += [*(f"-L{folder}" for folder in cpp_extension.library_paths()), *linked]
        subprocess.run(command, check=True)
        made.replace(found)
    return found
