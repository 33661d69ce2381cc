"""Loads the C++ extension, or raises ImportError with the reason and the way out.

    from zerox._ext import C, build_info, cuda_refusal

Everything that can be checked is checked before the library is opened: opened under another torch it would answer with
an undefined symbol, or not at all.

Environment variables

    when   name                  values                 meaning
    -----  --------------------  ---------------------  ----------------------------------------------------------
    build  ZEROX_CUDA            auto (default), 0, 1   CUDA kernels; auto: where nvcc is found, also beside a CPU
                                                        build of torch; 1 fails when they cannot be built
    build  FORCE_CUDA            1                      the same as ZEROX_CUDA=1, where that is not set
    build  CUDA_HOME, CUDA_PATH  a folder               nvcc is its bin/nvcc; default: on the PATH, /usr/local/cuda
    build  TORCH_CUDA_ARCH_LIST  "9.0;10.0+PTX"         GPUs to build for, as torch has it, names such as Hopper
                                                        too; default: 8.0 9.0 10.0+PTX
    build  NVCC_PREPEND_FLAGS,   flags                  nvcc reads these itself; a change compiles again
           NVCC_APPEND_FLAGS
    build  ZEROX_WERROR          0 (default), 1         compiler warnings are errors, nvcc's too
    build  MAX_JOBS              a number (all cores)   compile jobs at a time; about 2 GB of memory each
    run    ZEROX_ISA             scalar, avx2, avx512   CPU kernels to use; default: the best this CPU has

`python -m zerox env` prints what is set and what came of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["C", "build_info", "cuda_refusal"]

_IN_CHECKOUT = (Path(__file__).parent.parent / "setup.py").exists()
# In a checkout the folder itself is what Python imports there, so the library has to be built into it.
_BUILD = f"pip install --no-build-isolation {'-e ' if _IN_CHECKOUT else ''}."


def build_info() -> dict[str, Any]:
    """What the extension was built from: version, torch, torch_cxx11_abi, cuda (nvcc's release, or False), cuda_archs,
    nvcc_flags, compiler, flags, git_commit, python, build_date. Raises ImportError where nothing was built."""
    try:
        from zerox._build_info import BUILD_INFO
    except ImportError:
        raise ImportError(f"zerox's C++ extension is not built: run `{_BUILD}` in the source folder") from None
    return dict(BUILD_INFO)


def cuda_refusal() -> str | None:
    """Why CUDA tensors can't be used with this build, and the way out; None where they can."""
    import torch

    nvcc, of_torch = build_info().get("cuda"), torch.version.cuda
    with_cuda = f"ZEROX_CUDA=1 {_BUILD}"
    if torch.version.hip:
        return f"zerox has no kernels for ROCm, and this is torch {torch.__version__}"
    if not nvcc:
        return f"this build of zerox has CPU kernels only: put nvcc on the PATH and run `{with_cuda}`"
    if of_torch and of_torch.split(".")[0] != nvcc.split(".")[0]:
        return (
            f"zerox was built by nvcc {nvcc}, and torch {torch.__version__} is of CUDA {of_torch}: "
            f"put an nvcc of CUDA {of_torch.split('.')[0]} on the PATH and run `{with_cuda}`"
        )
    return None


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
