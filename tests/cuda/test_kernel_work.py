"""What the CUDA kernels' loops move and issue an element, as bench/kernel_work.json has it: no GPU is needed.

That the machine code does so, test_kernel_resources.py says: it has it disassembled.
"""

from __future__ import annotations

import json

import pytest

from bench import jobs
from kernel_table import UPDATES, WORK, Loop, loops, once_round
from sass import Instruction

# One H200: multiprocessors, clocks a second, and bytes a second that a copy reads and writes.
PROCESSORS, CLOCK_HZ, COPY_BYTES_PER_S = 132, 1.98e9, 4.3e12


def each_update(op: str) -> dict[str, float]:
    """Instructions an element of an update, by what is updated and how its states are stored."""
    work = json.loads(WORK.read_text())["an_element"]
    return {name.partition(", ")[2]: each["instructions"] for name, each in work.items() if name.split(", ")[0] == op}


@pytest.mark.parametrize("op", [op for op in UPDATES if op != "adam"])
def test_rules_that_do_less_than_adam_take_fewer_instructions(op: str) -> None:
    adam, ours = each_update("adam"), each_update(op)
    assert ours.keys() == {name for name in adam if op != "sgd" or name.endswith("fp32")}
    assert all(ours[name] < adam[name] for name in ours), (ours, adam)


def job_of(name: str) -> jobs.Job:
    op, kind, *state = name.split(", ")
    op, _, num_slices = op.partition(" of ")
    found = next(
        each for each in jobs.kinds_of(op) if each.name == kind and each.state == (state[0] if state else "fp32")
    )
    return jobs.Job(op, found, "", (1,), int(num_slices or 1))


@pytest.mark.parametrize("name", loops())
def test_a_loop_moves_the_bytes_that_have_to_be_moved(name: str) -> None:
    job = job_of(name)
    # Of each state a block has a scale, which is read and written.
    num_states = UPDATES[job.op][1] if job.kind.state == "8bit" else 0
    scales = 2 * 4 / 256 * num_states
    assert loops()[name].bytes_an_element + scales == jobs.bytes_an_element(job.op, job.kind, job.num_slices)


def test_every_kind_that_is_timed_has_its_loop_counted() -> None:
    timed = {f"{op}, {kind.name}, {kind.state}" for op in UPDATES for kind in jobs.kinds_of(op)}
    timed |= {f"{op}, {kind.name}" for op in ("flatten", "norm", "reduce of 2", "reduce of 8") for kind in jobs.SENT}
    assert set(loops()) == timed


def test_no_loop_takes_longer_for_instructions_than_for_bytes() -> None:
    """On the GPU with the fastest memory, where the instructions could least hide behind it."""
    work = json.loads(WORK.read_text())["an_element"]
    for name, each in work.items():
        instructions_s = each["clocks"] / (PROCESSORS * CLOCK_HZ)
        assert instructions_s < each["bytes"] / COPY_BYTES_PER_S, name


def code_of(*lines: str) -> list[Instruction]:
    """ "opcode operands", 16 bytes each; a guard in front."""
    found = []
    for index, text in enumerate(lines):
        guard = text.partition(" ")[0] if text.startswith("@") else ""
        opcode, _, operands = text.removeprefix(guard).strip().partition(" ")
        found.append(Instruction(16 * index, guard, opcode, operands))
    return found


# Loads 16 bytes, and where P0 says so adds by a call or slowly; stores 16 bytes, and goes on.
LOOP = code_of(
    "MOV R1, R2",
    "LDG.E.128 R4, [R2.64]",  # 0x10
    "@P0 BRA 0x60",
    "FADD R4, R4, R5",
    "FADD R4, R4, R5",
    "BRA 0x80",
    "CALL.REL.NOINC 0xb0",  # 0x60
    "BRA 0x80",
    "STG.E.128 [R2.64], R4",  # 0x80
    "@!P1 BRA 0x10",
    "EXIT",
    "RET.REL.NODEC R2",
)


def test_the_shortest_way_round_avoids_calls() -> None:
    way = once_round(LOOP, {r"LDG\.E\.128": 1, r"STG\.E\.128": 1})
    assert way is not None
    assert [each.address for each in way] == [0x10, 0x20, 0x30, 0x40, 0x50, 0x80, 0x90]


def test_a_way_that_moves_something_else_is_none() -> None:
    assert once_round(LOOP, {r"LDG\.E\.128": 2, r"STG\.E\.128": 1}) is None
    split = [each if each.opcode != "LDG.E.128" else Instruction(0x10, "", "LDG.E.64", "R4, [R2.64]") for each in LOOP]
    assert once_round(split, {r"LDG\.E\.128": 1, r"STG\.E\.128": 1}) is None


def test_an_inner_loop_is_run_as_often_as_is_wanted() -> None:
    inner = code_of(
        "LDG.E.128 R4, [R2.64]",
        "FADD R4, R4, R5",
        "@P0 BRA 0x0",
        "STG.E.128 [R2.64], R4",
        "@P1 BRA 0x0",
        "EXIT",
    )
    way = once_round(inner, {r"LDG\.E\.128": 3, r"STG\.E\.128": 1})
    assert way is not None
    assert [each.opcode for each in way].count("FADD") == 3
    assert len(way) == 3 * 3 + 2


def test_what_a_loop_wants_follows_from_its_streams() -> None:
    wanted = Loop("", 8, (2, 4, 1), (4,)).wanted
    assert sorted(wanted.values()) == [1, 2, 3]  # one load of 64 bits, 1 + 2 of 128, two stores of 128
