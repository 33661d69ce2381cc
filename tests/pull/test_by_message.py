"""The same where ranks can't read each other's memory: they ask, and are answered. See Note [Questions]."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.allocator import Allocator, build
from tests.optimizer.models import KINDS
from tests.programs import run_programs
from tests.pull.test_ends import (
    AT_MODULE_LEVEL,
    IN_A_FUNCTION,
    PARENT,
    SPAWNED,
    STAYS,
    STEPS_ON,
    deletes,
    ends_at_once,
    start,
)
from tests.pull.test_rank_0_saves import (
    LATE,
    REMAINDERS,
    assert_same,
    check_that_it_is_named,
    full,
    late_owner,
    loaded,
    owner_ends,
    saved,
    saves_alone,
    saves_beside,
    steps_meanwhile,
    trained,
)
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

SWITCH = {"ZEROX_EXCHANGE": "messages"}
CHUNK = 16 * 2**20  # bytes of an answer
MESSAGES = 100_000  # of all that are short


def by_message(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    with patch.dict(os.environ, SWITCH):
        return function(rank, world_size, *args)


@pytest.mark.parametrize(
    ("kind", "stage"), [*((kind, 2) for kind in KINDS), (REMAINDERS, 1), (REMAINDERS, 3), ("fp32", 3)]
)
def test_the_whole_state_is_written_and_the_same_bytes_on_any_rank(kind: str, stage: int) -> None:
    files = run_ranks(by_message, 3, saves_alone, kind, stage)
    assert len(set(files)) == 1


@pytest.mark.parametrize("how", LATE, ids=str)
def test_a_pull_waits_until_the_owner_has_come_as_far(how: tuple[Any, ...]) -> None:
    run_ranks(by_message, 2, late_owner, *how)


def test_each_file_is_the_state_of_one_step() -> None:
    run_ranks(by_message, 3, saves_beside, 10)


@pytest.mark.deep
def test_each_of_300_files_is_the_state_of_one_step() -> None:
    run_ranks(by_message, 3, saves_beside, 100, timeout_s=600)


def test_a_step_waits_for_a_tensor_that_is_being_pulled() -> None:
    assert min(run_ranks(by_message, 2, steps_meanwhile)) > 0.4


def saves_a_large_one(rank: int, world_size: int, library: Path) -> int:
    """Returns the bytes that this rank still has for its answers."""
    allocator = Allocator(library)
    params = [nn.Parameter(torch.ones(5 * CHUNK // 4 + 3)), nn.Parameter(torch.ones(7))]
    optimizer = FusedShardedAdam(params, lr=0.1)
    for param in params:
        param.grad = torch.rand_like(param)
    optimizer.step()
    optimizer.zero_grad()
    expected = full(optimizer)
    dist.barrier()
    before = allocator.now
    found = saved(optimizer.state_dict()) if rank == 0 else b""
    dist.barrier()
    if rank == 0:
        assert_same(loaded(found), expected)
    deadline = time.monotonic() + 20
    while allocator.now - before >= MESSAGES and time.monotonic() < deadline:
        time.sleep(0.01)  # until this rank has heard that it is through
    return allocator.now - before


def test_answers_come_in_parts_and_are_not_kept() -> None:
    for kept in run_ranks(by_message, 2, saves_a_large_one, build()):
        assert kept < MESSAGES


def loses_state(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank, "fp32")
    shown = optimizer.state_dict()
    if rank == 1:
        optimizer.inside.buckets[0].state["exp_avg"].values.untyped_storage().resize_(0)
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 can't be read: it can't read its own state"):
            saved(shown)
        with pytest.raises(RuntimeError, match="rank 1 can't be read: it can't read its own state"):
            saved(shown)
    dist.barrier()


def test_a_rank_that_cannot_read_its_own_state_says_so() -> None:
    run_ranks(by_message, 2, loses_state)


def test_an_owner_that_is_gone_is_named(tmp_path: Path) -> None:
    check_that_it_is_named(tmp_path, by_message, owner_ends)


def is_slow_in_a_barrier(rank: int, world_size: int) -> float:
    """Rank 1 stands in a barrier of somebody else's, and its machine is slow: longer than long waits are asked for.
    Returns how long a save took."""
    _, optimizer = trained(rank, "fp32")
    shown, process = optimizer.state_dict(), torch.tensor([os.getpid()])
    dist.broadcast(process, 1)
    took = 0.0
    if rank == 1:
        optimizer.inside.ranks.failure_detector.stand_outside("a barrier of a framework's")
        subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 7; kill -CONT {os.getpid()}"], check=True)
    else:
        while " T " not in Path(f"/proc/{int(process)}/stat").read_text():
            time.sleep(0.01)
        start = time.monotonic()
        saved(shown)
        took = time.monotonic() - start
    dist.barrier()
    return took


def test_an_owner_in_a_barrier_answers_however_long_that_takes() -> None:
    assert run_ranks(by_message, 2, is_slow_in_a_barrier)[0] > 4


def differs(rank: int, world_size: int) -> None:
    refusal = pytest.raises(ValueError, match=r"ranks must agree: rank . has .*ZEROX_STATE_PULL")
    with patch.dict(os.environ, {"ZEROX_STATE_PULL": f"{rank}"}), refusal:
        trained(rank)


def test_ranks_that_were_told_otherwise_are_named() -> None:
    run_ranks(differs, 2)


# ---- ranks at their end


@pytest.fixture
def _by_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*next(iter(SWITCH.items())))


@pytest.mark.usefixtures("_by_message")
@pytest.mark.parametrize(
    ("script", "how", "stage"),
    [(IN_A_FUNCTION, "returns", 1), (AT_MODULE_LEVEL, "ends", 3), (IN_A_FUNCTION, "destroys", 3)],
    ids=["in a function", "at module level", "destroys its group"],
)
def test_rank_0_saves_when_the_others_are_through(script: str, how: str, stage: int, tmp_path: Path) -> None:
    assert run_programs(script, tmp_path, how, str(stage), "60")[0] == "saved\n"


# The system call by which processes read others', and themselves, as containers may have it.
FORBIDDEN = """
import ctypes, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program) == 0  # PR_SET_SECCOMP, a filter
assert libc.process_vm_readv(0, None, 0, None, 0, 0) == -1 and ctypes.get_errno() == 1
"""


def test_ranks_ask_where_the_system_forbids_that_they_read(tmp_path: Path) -> None:
    assert run_programs(FORBIDDEN + IN_A_FUNCTION, tmp_path, "returns", "1", "60")[0] == "saved\n"


@pytest.mark.usefixtures("_by_message")
def test_ranks_that_are_spawned_are_read_too(tmp_path: Path) -> None:
    assert run_programs(SPAWNED, tmp_path, "returns", "1", "60")[0] == "saved\n"


@pytest.mark.usefixtures("_by_message")
@pytest.mark.parametrize("how", ["SIGTERM", "killed", "timeout"])
def test_a_rank_that_stays_ends_at_once_where_nobody_reads_it(how: str, tmp_path: Path) -> None:
    ends_at_once(how, start(STAYS, tmp_path, how, 1, 2.0 if how == "timeout" else 60.0))


@pytest.mark.usefixtures("_by_message")
@pytest.mark.parametrize("stage", [1, 3])
def test_who_waits_for_a_rank_that_is_through_is_told_soon(stage: int, tmp_path: Path) -> None:
    assert run_programs(STEPS_ON, tmp_path, "ends", str(stage), "60")[0] == "raised\n"


@pytest.mark.usefixtures("_by_message")
def test_a_child_does_not_stay_for_its_parent(tmp_path: Path) -> None:
    assert run_programs(PARENT, tmp_path, "spawn", "1", "60")[0] == "joined\n"


def test_deleted_state_is_kept_until_all_have_deleted_it() -> None:
    run_ranks(by_message, 2, deletes, 2)
