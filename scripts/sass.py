"""The machine code of the CUDA kernels, disassembled without a GPU, as a graph that can be walked.

The disassembler is NVIDIA's: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or a toolkit's on the PATH.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import build_cuda

TOOLS = ("cuobjdump", "nvdisasm")  # the first calls the second
Kernel = tuple[str, str]  # readable name, architecture


@dataclass(frozen=True)
class Instruction:
    """``guard``: the predicate under which it runs ("@!P0"), or none. ``target``: the address that it may go to."""

    address: int
    guard: str
    opcode: str  # LDG.E.128
    operands: str

    @property
    def target(self) -> int | None:
        if not self.opcode.startswith(("BRA", "CALL", "JMP")):
            return None
        match = re.search(r"0x([0-9a-f]+)$", self.operands)
        return int(match[1], 16) if match else None

    @property
    def is_conditional(self) -> bool:
        """BRA has a second condition in front of its target."""
        return bool(self.guard) or re.match(r"!?U?P\d", self.operands) is not None


def search_path() -> str:
    """The PATH, and where the packages of PyPI have their programs."""
    namespace = importlib.util.find_spec("nvidia")
    roots = (namespace.submodule_search_locations if namespace else None) or []
    folders = [str(folder) for root in roots for folder in sorted(Path(root).glob("*/bin"))]
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def missing_tool() -> str | None:
    missing = [tool for tool in TOOLS if shutil.which(tool, path=search_path()) is None]
    return f"no {' and '.join(missing)}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm" if missing else None


def disassemble(objects: Iterable[Path], arch: str | None = None) -> dict[Kernel, list[Instruction]]:
    """``arch``: of this architecture alone ("sm_90"), which is as much faster as there are others."""
    if reason := missing_tool():
        raise build_cuda.BuildError(reason)
    environment = os.environ | {"PATH": search_path()}
    command = [TOOLS[0], "-sass", *(["-arch", arch] if arch else [])]
    found: dict[tuple[str, str], list[Instruction]] = {}
    for each in objects:
        done = subprocess.run([*command, str(each)], capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise build_cuda.BuildError(f"{TOOLS[0]}: {done.stderr}")
        found |= parse(done.stdout)
    names = dict(zip(found, readable([name for name, _ in found]), strict=True))
    return {(names[name, arch], arch): code for (name, arch), code in found.items()}


def readable(mangled: list[str]) -> list[str]:
    """`adam<float, 2>` for zx::(anonymous namespace)::adam<float, 2>(Arguments)."""
    program = shutil.which("c++filt")
    if not program:
        raise build_cuda.BuildError("c++filt is missing: install binutils")
    command = [program, "--no-params"]
    done = subprocess.run(command, input="\n".join(mangled), capture_output=True, text=True, check=True)
    return done.stdout.replace("(anonymous namespace)::", "").replace("zx::", "").splitlines()


LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def parse(listing: str) -> dict[Kernel, list[Instruction]]:
    found: dict[Kernel, list[Instruction]] = {}
    arch, code = "", []
    for line in listing.splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\w+)", line):
            code = found.setdefault((match[1], arch), [])
        elif match := LINE.match(line):
            code.append(Instruction(int(match[1], 16), (match[2] or "").strip(), match[3], match[4]))
    return found
