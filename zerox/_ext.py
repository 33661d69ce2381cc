"""Loads the C++ extension, or raises ImportError with the reason and the way out.

    from zerox._ext import C, build_info

Everything that can be checked is checked before the library is opened: opened under another torch it would answer with
an undefined symbol, or not at all.

Environment variables

    when   name          values                 meaning
    -----  ------------  ---------------------  ------------------------------------------------------------------
    build  ZEROX_CUDA    auto (default), 0, 1   CUDA kernels; 1 fails when they cannot be built. Not in this version
                                                yet: auto and 0 build for the CPU, 1 fails.
    build  ZEROX_WERROR  0 (default), 1         compiler warnings are errors
    build  MAX_JOBS      a number (all cores)   compile jobs at a time; about 2 GB of memory each
    run    ZEROX_ISA     scalar, avx2, avx512   CPU kernels to use; default: the best this CPU has

`python -m zerox env` prints what is set and what came of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["C", "build_info"]

_IN_CHECKOUT = (Path(__file__).parent.parent / "setup.py").exists()
# In a checkout the folder itself is what Python imports there, so the library has to be built into it.
_BUILD = f"pip install --no-build-isolation {'-e ' if _IN_CHECKOUT else ''}."


def build_info() -> dict[str, Any]:
    """What the extension was built from: version, torch, torch_cxx11_abi, cuda, compiler, flags, git_commit, python,
    build_date. Raises ImportError where nothing was built."""
    try:
        from zerox._build_info import BUILD_INFO
    except ImportError:
        raise ImportError(f"zerox's C++ extension is not built: run `{_BUILD}` in the source folder") from None
    return dict(BUILD_INFO)


def _load() -> Any:
    info = build_info()
    try:
        import torch
        from packaging.version import Version
    except ModuleNotFoundError as error:
        raise ImportError(f"zerox needs {error.name}: run `pip install {error.name}`") from None

    python = "{}.{}".format(*sys.version_info[:2])
    if info["python"] != python:
        raise ImportError(f"zerox was built for Python {info['python']}, this is {python}: run `{_BUILD}` again")
    if Version(info["torch"]).release[:2] != Version(torch.__version__).release[:2]:
        raise ImportError(
            f"zerox was built for torch {info['torch']}, this is torch {torch.__version__}: run `{_BUILD}` again"
        )
    if importlib.util.find_spec("zerox._C") is None:
        raise ImportError(f"zerox's C++ extension is not built: run `{_BUILD}` in the source folder")
    try:
        module = importlib.import_module("zerox._C")
    except ImportError as error:
        raise ImportError(f"zerox's C++ extension does not load, run `{_BUILD}` again: {error}") from error

    try:
        module.select_isa(os.environ.get("ZEROX_ISA", ""))
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # names ZEROX_ISA; a C++ error may carry its stack below
        raise ImportError(reason) from None
    return module


if TYPE_CHECKING:
    import zerox._C as C
else:
    C = _load()
