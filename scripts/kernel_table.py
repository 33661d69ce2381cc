"""What nvcc makes of the CUDA kernels: what each takes of a GPU, and the work of its loop for an element.

    python scripts/kernel_table.py            prints both
    python scripts/kernel_table.py --update   writes them to tests/cuda/kernel_resources.txt and bench/kernel_work.json,
                                              which tests hold them against

No GPU is needed. Registers, shared memory, and stack and spills, which no kernel should have, are those that ptxas
reports for the default architectures. Another release of nvcc gives other numbers, so both files name their own.

Work is bytes moved and instructions issued, counted in the machine code for Hopper (sm_90). A kernel's loop is walked
once round, by the shortest way that moves as many bytes as its design says, in accesses as wide as it says: that leaves
out what is not run for ordinary elements, and finds none where a load was split or a stream is read twice. What each
multiprocessor can issue in a clock then gives the least time that the instructions take, as the bytes give that of the
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_cuda
import sass
from sass import Instruction, Kernel

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/cuda/kernel_resources.txt"
WORK = ROOT / "bench/kernel_work.json"
UPDATE = "python scripts/kernel_table.py --update"
HEADER = f"""\
# What ptxas of nvcc {{}} makes of csrc/cuda: registers a thread / bytes of static shared memory a block.
# Written by: {UPDATE}
"""


# ---- what each kernel takes


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
    table: Table = {}
    for path in build.compile(ROOT, jobs=int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)):
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


# ---- the loops, and what a multiprocessor issues

ARCH = "sm_90"

# Results a clock of one multiprocessor of compute capability 9.0: CUDA C++ Programming Guide, "Throughput of Native
# Arithmetic Instructions". The first that matches. All together no more than ISSUED a clock: four warps of 32.
ISSUED = 128
PIPES = (
    (r"FADD|FMUL|FFMA", "fp32", 128),
    (r"DADD|DMUL|DFMA|DSETP", "fp64", 64),
    (r"MUFU|F2F|F2I|I2F", "special", 16),
    (r"LD|ST|SHFL|ATOM|RED", "memory", 32),
    (r"IMAD", "integer multiply", 64),
    (r"U[A-Z]|S2|CS2R|LDC|BRA|BS|EXIT|WARPSYNC|NOP|BAR|VOTE|MOV|YIELD|BREAK|CALL|RET|BMOV", "control", ISSUED),
    (r"", "integer", 64),  # additions, logic, shifts, comparisons, choices
)


@dataclass(frozen=True)
class Loop:
    """``wanted``: how many instructions of each kind once round has, for ``elements`` of a thread."""

    kernel: str
    elements: int
    loads: tuple[int, ...]  # bytes an element of each stream
    stores: tuple[int, ...]

    @property
    def wanted(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for name, streams in (("LDG", self.loads), ("STG", self.stores)):
            for size in streams:
                bits = min(128, self.elements * size * 8)
                counts[rf"{name}\.E\.(\w+\.)*{bits}\b"] += self.elements * size * 8 // bits
        return dict(counts)

    @property
    def bytes_an_element(self) -> int:
        return sum(self.loads) + sum(self.stores)


SIZES = {"float": 4, "bf16": 2, "f16": 2}


# The rule and its number of states, by the names that bench.kernels has for updates.
UPDATES = {"adam": ("Adam", 2), "sgd": ("Sgd", 0), "sgd momentum": ("Sgd", 1), "lion": ("Lion", 1)}


def update_loop(rule: str, num_states: int, where: str, grad: str, master_bytes: int, state: str) -> Loop:
    param = SIZES[where.partition("<")[2].removesuffix(">") or "bf16"]
    own = (param, master_bytes) if master_bytes else (param,)
    if state == "8bit":
        codes = (1,) * num_states
        name = f"cuda::update_block_kernel<cuda::BlockArgs<{rule}, cuda::{where}, {grad}> >"
        return Loop(name, 8, (*own, SIZES[grad], *codes), (*own, *codes))
    stored, size = {"fp32": ("float", 4), "bf16": ("bf16", 2)}[state]
    elements = 16 // min(*own, SIZES[grad], size)
    states = (size,) * num_states
    name = f"cuda::update_kernel<cuda::UpdateArgs<{rule}, cuda::{where}, {stored}, {grad}> >"
    return Loop(name, elements, (*own, SIZES[grad], *states), (*own, *states))


def loops() -> dict[str, Loop]:
    """By the names of bench.kernels: op, kind, state."""
    found = {}
    for kind, where, grad, master in (
        ("fp32", "PlainParam<float>", "float", 0),
        ("bf16 + remainder", "SplitParam", "bf16", 2),
        ("bf16 + fp32", "MasteredParam<bf16>", "bf16", 4),
        ("fp16 + fp32", "MasteredParam<f16>", "f16", 4),
    ):
        for update, (rule, num_states) in UPDATES.items():
            # Without states there is nothing to store in another way.
            for state in ("fp32",) if "+ fp32" in kind or num_states == 0 else ("fp32", "bf16", "8bit"):
                found[f"{update}, {kind}, {state}"] = update_loop(rule, num_states, where, grad, master, state)
    for kind, wire in (("fp32", "float"), ("bf16", "bf16"), ("fp16", "f16")):
        size = SIZES[wire]
        found[f"flatten, {kind}"] = Loop(f"cuda::flatten_kernel<{wire}, true>", 16 // size, (size,), (size,))
        found[f"norm, {kind}"] = Loop(f"cuda::norm_kernel<{wire}, (Norm)1>", 16, (size,), ())  # squares
        for num_slices in (2, 8):
            name = f"cuda::reduce_kernel<float, {wire}, false>"
            found[f"reduce of {num_slices}, {kind}"] = Loop(name, 16, (size,) * num_slices, (size,))
    return found


# ---- the way round


def nexts_of(code: Sequence[Instruction], at: dict[int, int]) -> list[tuple[int, ...]]:
    """The numbers of the instructions that may follow each; ``at`` has them by address.

    None follows a call: calls are for operands that nobody has.
    """
    found: list[tuple[int, ...]] = []
    for index, each in enumerate(code):
        behind = (index + 1,) if index + 1 < len(code) else ()
        jump = (at[each.target],) if each.target in at else ()
        if each.opcode.startswith("BRA") and not each.opcode.startswith("BRA.DIV"):  # that: lanes that have parted
            found.append(jump + (behind if each.is_conditional else ()))
        elif re.match(r"EXIT|RET", each.opcode):
            found.append(behind if each.guard else ())
        else:
            found.append(() if each.opcode.startswith("CALL") else behind)
    return found


def once_round(code: Sequence[Instruction], wanted: Mapping[str, int]) -> list[Instruction] | None:
    """The shortest closed way with exactly the ``wanted`` numbers of instructions, by patterns of opcodes.

    Guarded ones are for what is not always done, and don't count.
    """
    at = {each.address: index for index, each in enumerate(code)}
    nexts = nexts_of(code, at)
    counts = [tuple(int(not i.guard and bool(re.match(pattern, i.opcode))) for pattern in wanted) for i in code]
    # Each way has one of the kind that there are fewest of.
    starts = min(([index for index, had in enumerate(counts) if had[kind]] for kind in range(len(wanted))), key=len)
    ways = [way for start in starts if (way := way_round(nexts, counts, tuple(wanted.values()), start))]
    return [code[index] for index in min(ways, key=len)] if ways else None


def way_round(
    nexts: Sequence[tuple[int, ...]], counts: Sequence[tuple[int, ...]], goal: tuple[int, ...], start: int
) -> list[int] | None:
    """The instructions of the shortest way from ``start`` to ``start`` that has counted ``goal``."""
    first = (start, (0,) * len(goal))
    came_from = {first: first}
    queue = deque([first])
    while queue:
        index, had = here = queue.popleft()
        have = tuple(a + b for a, b in zip(had, counts[index], strict=True))
        if any(a > b for a, b in zip(have, goal, strict=True)):
            continue
        for following in ((each, have) for each in nexts[index]):
            if following == (start, goal):
                way = [index]
                while here != first:
                    here = came_from[here]
                    way.append(here[0])
                return way[::-1]
            if following not in came_from:
                came_from[following] = here
                queue.append(following)
    return None


# ---- the work of each loop


def work_of_loop(loop: Loop, code: Sequence[Instruction]) -> dict[str, Any]:
    """Raises build_cuda.BuildError where the loop is not as designed."""
    way = once_round(code, loop.wanted)
    if way is None:
        raise build_cuda.BuildError(f"{loop.kernel}: no way round its loop has {loop.wanted}")
    rates = {name: rate for _, name, rate in PIPES}
    pipes = Counter(next(name for pattern, name, _ in PIPES if re.match(pattern, each.opcode)) for each in way)
    clocks = {"issue": len(way) / ISSUED, **{name: count / rates[name] for name, count in pipes.items()}}
    bound = max(clocks, key=lambda name: clocks[name])
    return {
        "kernel": loop.kernel,
        "bytes": loop.bytes_an_element,
        "instructions": round(len(way) / loop.elements, 2),
        "pipes": {name: round(count / loop.elements, 2) for name, count in sorted(pipes.items())},
        "clocks": round(clocks[bound] / loop.elements, 4),
        "bound": bound,
    }


def line(name: str, work: Mapping[str, Any]) -> str:
    pipes = ", ".join(f"{each} {number:g}" for each, number in work["pipes"].items())
    return f"{name:34} {work['bytes']:3} bytes {work['instructions']:6.1f} instructions  {work['bound']:8} ({pipes})"


def work_of(build: build_cuda.CudaBuild, code: Mapping[Kernel, Sequence[Instruction]]) -> dict[str, Any]:
    """What WORK has. ``code``: of ARCH at least."""
    found = {name: work_of_loop(loop, code[loop.kernel, ARCH]) for name, loop in loops().items()}
    return {"nvcc": build.toolkit.release, "arch": ARCH, "written_by": UPDATE, "an_element": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write both files")
    update = parser.parse_args().update
    try:
        build = plan()
        table = render(kernel_table(build), build.toolkit.release)
        work = work_of(build, sass.disassemble(build.objects(ROOT), ARCH))
    except build_cuda.BuildError as error:
        print(f"zerox: {error}", file=sys.stderr)
        return 1
    print(table)
    print("\n".join(line(name, each) for name, each in work["an_element"].items()))
    if update:
        TABLE.write_text(table)
        WORK.write_text(json.dumps(work, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
