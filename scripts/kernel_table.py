"""What nvcc makes of the CUDA kernels: what each takes of a GPU, and the work of its loop for an element.

    python scripts/kernel_table.py            prints both
    python scripts/kernel_table.py --update   writes them to tests/cuda/kernel_resources.txt and bench/kernel_work.json,
                                              which tests hold them against

No GPU is needed. Registers, shared memory, and stack and spills, which no kernel should have, are those that ptxas
reports for the default architectures; kernel_work.py counts the work. Another release of nvcc gives other numbers, so
both files name their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_cuda
import kernel_work
import sass

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/cuda/kernel_resources.txt"
WORK = ROOT / "bench/kernel_work.json"
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


def jobs() -> int:
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def kernel_table(build: build_cuda.CudaBuild) -> Table:
    table: Table = {}
    for path in build.compile(ROOT, jobs()):
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
    names = sass.readable(list(found))
    assert len(set(names)) == len(names), f"kernels that differ in their arguments only: {sorted(names)}"
    return dict(zip(names, found.values(), strict=True))


def render(table: Table, release: str) -> str:
    archs = sorted(
        {arch for by_arch in table.values() for arch in by_arch}, key=lambda arch: int(arch.removeprefix("sm_"))
    )
    rows = [["kernel", *archs]]
    rows += [[name, *(str(table[name].get(arch, "-")) for arch in archs)] for name in sorted(table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return HEADER.format(release) + "\n".join(lines) + "\n"


def work_of(build: build_cuda.CudaBuild, code: Mapping[sass.Kernel, Sequence[sass.Instruction]]) -> dict[str, Any]:
    """What WORK has. ``code``: of kernel_work.ARCH at least."""
    head = {"nvcc": build.toolkit.release, "arch": kernel_work.ARCH, "written_by": UPDATE}
    return {**head, "an_element": kernel_work.count(code)}


def release_of(text: str) -> str:
    named = re.match(r"# What ptxas of nvcc (\S+) makes", text)
    return named[1] if named else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write both files")
    update = parser.parse_args().update
    try:
        build = plan()
        table = render(kernel_table(build), build.toolkit.release)
        work = work_of(build, sass.disassemble(build.objects(ROOT), kernel_work.ARCH))
    except build_cuda.BuildError as error:
        print(f"zerox: {error}", file=sys.stderr)
        return 1
    print(table)
    print("\n".join(kernel_work.line(name, each) for name, each in work["an_element"].items()))
    if update:
        TABLE.write_text(table)
        WORK.write_text(json.dumps(work, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
