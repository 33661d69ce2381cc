"""The machine code of the CUDA kernels, disassembled without a GPU, and what a test needs for that."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kernel_table

TOOLS = ("cuobjdump", "nvdisasm")  # the first calls the second


def need(reason: str | None) -> None:
    """Without a tool a test is skipped with the reason, but fails where CI promised to have all of them."""
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def search_path() -> str:
    """The PATH, and where the packages of PyPI have their programs."""
    namespace = importlib.util.find_spec("nvidia")
    roots = (namespace.submodule_search_locations if namespace else None) or []
    folders = [str(folder) for root in roots for folder in sorted(Path(root).glob("*/bin"))]
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def missing_tool() -> str | None:
    missing = [tool for tool in TOOLS if shutil.which(tool, path=search_path()) is None]
    return f"no {' and '.join(missing)}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm" if missing else None


def disassemble(objects: list[Path]) -> dict[tuple[str, str], list[str]]:
    """Instructions such as LDG.E.128, by name of the kernel and architecture."""
    path = search_path()
    program = shutil.which(TOOLS[0], path=path)
    assert program, TOOLS[0]
    found: dict[tuple[str, str], list[str]] = {}
    for each in objects:
        done = subprocess.run(
            [program, "-sass", str(each)], capture_output=True, text=True, env=os.environ | {"PATH": path}
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        found |= parse(done.stdout)
    names = dict(zip(found, kernel_table.readable([name for name, _ in found]), strict=True))
    return {(names[name, arch], arch): code for (name, arch), code in found.items()}


def parse(listing: str) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    arch, code = "", []
    for line in listing.splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\w+)", line):
            code = found.setdefault((match[1], arch), [])
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", line):
            code.append(match[1])
    return found
