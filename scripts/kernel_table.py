"""What each CUDA kernel takes of a GPU: registers, shared memory, and stack and spills, which none should have.

    python scripts/kernel_table.py            prints what nvcc makes of csrc/cuda
    python scripts/kernel_table.py --update   writes it to tests/cuda/kernel_resources.txt, which tests hold it against

No GPU is needed. The numbers are those that ptxas reports for the default architectures; another release of nvcc gives
others, so the table names its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import build_cuda

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/cuda/kernel_resources.txt"
UPDATE = "python scripts/kernel_table.py --update"
HEADER = f"""\
# What ptxas of nvcc {{}} makes of csrc/cuda: registers a thread / bytes of static shared memory a block.
# Written by: {UPDATE}
"""


@dataclass
class Resources:
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0  # stored and loaded

    def __str__(self) -> str:
        spilled = f" stack {self.stack_bytes} spills {self.spill_bytes}" if self.stack_bytes or self.spill_bytes else ""
        return f"{self.registers}/{self.shared_bytes}{spilled}"


Table = dict[str, dict[str, Resources]]  # by name of the kernel, by architecture


def plan() -> build_cuda.CudaBuild:
    """Default architectures and the switches of setup.py, whose objects are then used again."""
    return build_cuda.plan_build(ROOT, wanted_archs="", werror=os.environ.get("ZEROX_WERROR", "0") == "1")


def kernel_table(build: build_cuda.CudaBuild) -> Table:
    objects = build.compile(ROOT, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    table: Table = {}
    for path in objects:
        for name, by_arch in parse(path.with_suffix(".ptxas").read_text()).items():
            assert name not in table, f"two kernels are called {name}"
            table[name] = by_arch
    return table


def parse(report: str) -> Table:
    """What ptxas says is "Compiling entry function 'K' for 'sm_90'", then properties of K and of whatever it calls."""
    found: dict[str, dict[str, Resources]] = {}
    now = Resources()
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            now = found.setdefault(entry[1], {}).setdefault(entry[2], Resources())
        elif memory := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            now.stack_bytes += int(memory[1])
            now.spill_bytes += int(memory[2]) + int(memory[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            now.registers, now.shared_bytes = int(used[1]), int(shared[1]) if shared else 0
    names = readable(list(found))
    assert len(set(names)) == len(names), f"kernels that differ in their arguments only: {sorted(names)}"
    return dict(zip(names, found.values(), strict=True))


def readable(mangled: list[str]) -> list[str]:
    """`adam<float, 2>` for zx::(anonymous namespace)::adam<float, 2>(Arguments)."""
    program = shutil.which("c++filt")
    if not program:
        raise build_cuda.BuildError("c++filt is missing: install binutils")
    lines = subprocess.run([program], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = []
    for line in lines.splitlines():
        name = line.replace("(anonymous namespace)::", "").replace("zx::", "").removeprefix("void ")
        depth = 0
        for at, char in enumerate(name):
            depth += {"<": 1, ">": -1}.get(char, 0)
            if char == "(" and depth == 0:  # within < > it is the type of an enumerator
                name = name[:at]
                break
        names.append(name)
    return names


def render(table: Table, release: str) -> str:
    archs = sorted(
        {arch for by_arch in table.values() for arch in by_arch}, key=lambda arch: int(arch.removeprefix("sm_"))
    )
    rows = [["kernel", *archs]]
    rows += [[name, *(str(table[name].get(arch, "-")) for arch in archs)] for name in sorted(table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return HEADER.format(release) + "\n".join(lines) + "\n"


def release_of(text: str) -> str:
    named = re.match(r"# What ptxas of nvcc (\S+) makes", text)
    return named[1] if named else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Registers, shared memory, stack and spills of the CUDA kernels.")
    parser.add_argument("--update", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    update = parser.parse_args().update
    try:
        build = plan()
        text = render(kernel_table(build), build.toolkit.release)
    except build_cuda.BuildError as error:
        print(f"zerox: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    if update:
        TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
