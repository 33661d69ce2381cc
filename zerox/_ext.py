"""Loads the C++ extension, or raises ImportError with the reason and the way out.

    from zerox._ext import C, build_info, cuda_refusal

All checks come before the library is opened: under another torch that would fail with an undefined symbol, or without a
word.

zerox/plan/environment.py has the table of environment variables; `python -m zerox env` prints their values, and the
effect.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["C", "build_info", "cuda_refusal"]

_FOLDER = Path(__file__).parent.parent
_IN_CHECKOUT = (_FOLDER / "setup.py").exists()
# In a checkout Python imports the folder itself, so the library has to be built into it.
_BUILD = f"pip install {'-e ' if _IN_CHECKOUT else ''}."


def _find_other_install() -> str | None:
    """The folder of another zerox, a built one, which Python would import if it did not find this one first."""
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != _FOLDER.resolve()]
    found = importlib.machinery.PathFinder.find_spec("zerox", others)
    package = Path(found.origin).parent if found and found.origin else None
    return str(package) if package and (package / "_build_info.py").exists() else None


def _not_built() -> ImportError:
    if _IN_CHECKOUT and (installed := _find_other_install()):
        return ImportError(
            f"zerox's sources in {_FOLDER} hide the installed package, {installed}: start Python in another folder, or "
            f"run `{_BUILD}` in the source folder to use the sources"
        )
    return ImportError(f"zerox's C++ extension is not built: run `{_BUILD}` in the source folder")


def build_info() -> dict[str, Any]:
    """What the extension was built from: version, torch, torch_cxx11_abi, cuda (nvcc's release, or False), cuda_archs,
    nvcc_flags, compiler, flags, git_commit, python, build_date. Raises ImportError if nothing was built."""
    try:
        from zerox._build_info import BUILD_INFO
    except ImportError:
        raise _not_built() from None
    return dict(BUILD_INFO)


def cuda_refusal() -> str | None:
    """Why CUDA tensors can't be used with this build, and the way out; None if they can."""
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
        raise _not_built()
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
