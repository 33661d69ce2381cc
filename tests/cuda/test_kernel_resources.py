"""What nvcc makes of the CUDA kernels, read from its objects: no GPU is needed.

Registers are compared with a table, so that none is lost unseen. No kernel touches local memory. Those that stream over
whole shards move 16 bytes or more at a time, or half of the bandwidth stays unused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

import build_cuda
import kernel_table
from kernel_table import ROOT, TABLE, UPDATE, WORK, Resources, Table
from sass import Instruction, Kernel, disassemble, missing_tool, parse
from tests.cuda.tools import need

pytestmark = pytest.mark.deep
# Kernels that stream, by the beginning of their names, and the instructions that they must have on every architecture.
LOAD = r"LDG\.E\S*\.(128|256)"
STORE = r"STG\.E\S*\.(128|256)"
STREAMS: dict[str, list[str]] = {
    "cuda::update_kernel<": [LOAD, STORE],
    "cuda::update_block_kernel<": [LOAD, STORE],
    "cuda::flatten_kernel<": [LOAD, STORE],
    "cuda::reduce_kernel<": [LOAD, STORE],
    "cuda::norm_kernel<": [LOAD],
}
# Of the updates that most people run: how many 16-byte loads and stores one thread's elements take without states, and
# how many more of each with every state, if no stream is narrower. 4 elements of fp32; 8 where something has 16 bits.
TYPES = {
    "PlainParam<float>, float, float": (1 + 1, 1, 1),  # parameter, gradient; parameter
    "SplitParam, float, bf16": (1 + 1 + 1, 1 + 1, 2),
    "MasteredParam<bf16>, float, bf16": (1 + 2 + 1, 1 + 2, 2),
    "MasteredParam<f16>, float, f16": (1 + 2 + 1, 1 + 2, 2),
    "PlainParam<float>, bf16, float": (2 + 2, 2, 1),
    "SplitParam, bf16, bf16": (1 + 1 + 1, 1 + 1, 1),
}
BLOCK_TYPES = {  # without their codes: a lane has 8, which are 8 bytes
    "PlainParam<float>, float": (2 + 2, 2, 0),
    "SplitParam, bf16": (1 + 1 + 1, 1 + 1, 0),
}
UPDATES = {
    f"cuda::{kernel}<{rule}, cuda::{types}> >": (loads + num_states * each, stores + num_states * each)
    for rule, num_states in (("Adam", 2), ("Sgd", 1), ("Lion", 1))
    for kernel, table in (
        ("update_kernel<cuda::UpdateArgs", TYPES),
        ("update_block_kernel<cuda::BlockArgs", BLOCK_TYPES),
    )
    for types, (loads, stores, each) in table.items()
}

if not build_cuda.kernel_sources(ROOT):
    pytest.skip("csrc/cuda has no kernels", allow_module_level=True)


Listing = dict[Kernel, list[Instruction]]
Code = dict[Kernel, list[str]]  # opcodes


@pytest.fixture(scope="module")
def build() -> build_cuda.CudaBuild:
    try:
        return kernel_table.plan()
    except build_cuda.BuildError as error:
        need(str(error))
        raise


@pytest.fixture(scope="module")
def table(build: build_cuda.CudaBuild) -> Table:
    return kernel_table.kernel_table(build)


@pytest.fixture(scope="module")
def listing(build: build_cuda.CudaBuild, table: Table) -> Listing:
    need(missing_tool())
    return disassemble(build.objects(ROOT))


@pytest.fixture(scope="module")
def code(listing: Listing) -> Code:
    return {kernel: [i.opcode for i in instructions] for kernel, instructions in listing.items()}


def each(table: Table) -> Iterator[tuple[str, str, Resources]]:
    for name, by_arch in table.items():
        for arch, resources in by_arch.items():
            yield name, arch, resources


def test_registers_are_as_committed(build: build_cuda.CudaBuild, table: Table) -> None:
    committed = TABLE.read_text() if TABLE.exists() else ""
    release = re.match(r"# What ptxas of nvcc (\S+) makes", committed)
    if release and release[1] != build.toolkit.release:
        pytest.skip(f"{TABLE.name} is of nvcc {release[1]}, this is {build.toolkit.release}")
    now = kernel_table.render(table, build.toolkit.release)
    assert now.splitlines() == committed.splitlines(), f"if this is meant: {UPDATE}"


def test_every_kernel_is_built_for_every_architecture(build: build_cuda.CudaBuild, table: Table) -> None:
    archs = {"sm_" + arch.removesuffix("+PTX").replace(".", "") for arch in build.archs}
    assert {name: set(by_arch) for name, by_arch in table.items()} == dict.fromkeys(table, archs)


def test_no_kernel_has_a_stack_or_spills(table: Table) -> None:
    bad = {f"{name} {arch}": str(r) for name, arch, r in each(table) if r.stack_bytes or r.spill_bytes}
    assert not bad


def test_no_kernel_touches_local_memory(code: Code, table: Table) -> None:
    assert set(code) == {(name, arch) for name, arch, _ in each(table)}, "ptxas and the disassembler see other kernels"
    assert all("EXIT" in instructions for instructions in code.values()), "the listing was not understood"
    bad = {key: [i for i in instructions if re.match(r"LDL|STL", i)] for key, instructions in code.items()}
    assert not {key: found for key, found in bad.items() if found}


@pytest.mark.parametrize("start", STREAMS)
def test_streaming_kernels_move_16_bytes_at_a_time(start: str, code: Code) -> None:
    kernels = {key: instructions for key, instructions in code.items() if key[0].startswith(start)}
    assert kernels, f"no kernel is called {start}..."
    for key, instructions in kernels.items():
        for pattern in STREAMS[start]:
            used = sorted({i for i in instructions if re.match(r"LDG|STG", i)})
            assert any(re.match(pattern, i) for i in instructions), f"{key} has no {pattern}, but {used}"
        generic = sorted({i for i in instructions if re.match(r"(LD|ST)\.", i)})
        assert not generic, f"{key} does not know that it moves global memory: {generic}"


@pytest.mark.parametrize("name", UPDATES)
def test_every_stream_of_the_update_is_wide(name: str, code: Code) -> None:
    loads, stores = UPDATES[name]
    found = [instructions for key, instructions in code.items() if key[0] == name]
    assert found, f"there is no {name}"
    for instructions in found:
        # At least, since a kernel is for every number of states that its rule may keep.
        bits = {
            kind: sum(int(m[1]) for i in instructions if (m := re.match(pattern, i)))
            for kind, pattern in (("loads", LOAD), ("stores", STORE))
        }
        assert bits["loads"] >= loads * 128
        assert bits["stores"] >= stores * 128


def test_loops_do_what_the_table_says(build: build_cuda.CudaBuild, listing: Listing) -> None:
    committed = json.loads(WORK.read_text())
    if committed["nvcc"] != build.toolkit.release:
        pytest.skip(f"{WORK.name} is of nvcc {committed['nvcc']}, this is {build.toolkit.release}")
    assert kernel_table.work_of(build, listing) == committed, f"if this is meant: {UPDATE}"


def test_a_spill_is_noticed() -> None:
    report = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN2zx4adamIfEEvPf' for 'sm_90'
ptxas info    : Function properties for _ZN2zx4adamIfEEvPf
    24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem
"""
    found = kernel_table.parse(report)
    assert found == {"adam<float>": {"sm_90": Resources(255, 16, 24, 12)}}
    assert "255/16 stack 24 spills 12" in kernel_table.render(found, "13.0.88")


def test_the_listing_is_understood() -> None:
    listing = """
arch = sm_100
\t\tFunction : _ZN2zx4adamIfEEvPf
        /*00e0*/              @!P0 LDG.E.128.CONSTANT R4, [R6.64] ;    /* 0x0000000406047981 */
                                                                       /* 0x000ea4000c1e1d00 */
        /*01d0*/                   STL [R1], R4 ;                      /* 0x0000000402007986 */
"""
    load = Instruction(0xE0, "@!P0", "LDG.E.128.CONSTANT", "R4, [R6.64]")
    store = Instruction(0x1D0, "", "STL", "[R1], R4")
    assert parse(listing) == {("_ZN2zx4adamIfEEvPf", "sm_100"): [load, store]}
