"""A rank that is through with its script, or with its optimizer, is read by those that are not."""

from __future__ import annotations

import gc
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.optimizer.test_full_state import train
from tests.programs import Program, run_programs
from tests.pull.test_rank_0_saves import assert_same, full, loaded, made, saved
from tests.ranks import run_ranks

# How it ends, the stage, and the timeout in seconds follow what tests/programs.py gives.
SCRIPT = """
import io, os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import zerox

rank, store, how, stage, timeout = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])

def setup():
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                            timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return model, zerox.FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage)

def train(model, optimizer):
    torch.manual_seed(rank)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def save(model, optimizer, expected):
    time.sleep(1.5)  # the other rank is through since
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    file.seek(0)
    found = torch.load(file)
    for number, state in expected["state"].items():
        assert state.keys() == found["optimizer"]["state"][number].keys()
        for key, value in state.items():
            assert torch.equal(value, found["optimizer"]["state"][number][key]), key
    assert all(value.isfinite().all() and value.numel() for value in found["model"].values())
    print("saved")

def main():
    model, optimizer = setup()
    for _ in range(2):
        train(model, optimizer)
    expected = optimizer.full_state_dict()
    if rank == 0:
        save(model, optimizer, expected)
    if how == "destroys":
        dist.destroy_process_group()
"""
IN_A_FUNCTION = SCRIPT + "\nmain()\n"
AT_MODULE_LEVEL = SCRIPT.replace("def main():", "if True:")


@pytest.mark.parametrize(
    ("script", "how", "stage"),
    [
        (IN_A_FUNCTION, "returns", 1),
        (AT_MODULE_LEVEL, "ends", 3),
        (IN_A_FUNCTION, "destroys", 3),
        (AT_MODULE_LEVEL, "destroys", 1),
    ],
    ids=["in a function", "at module level", "destroys its group", "destroys its group at module level"],
)
def test_rank_0_saves_when_the_others_are_through(script: str, how: str, stage: int, tmp_path: Path) -> None:
    assert run_programs(script, tmp_path, how, str(stage), "60")[0] == "saved\n"


SPAWNED = (
    SCRIPT.replace("rank, store, how, stage, timeout = int(sys.argv[1]),", "store, how, stage, timeout =")
    + """
def spawned(number):
    global rank
    rank = number
    main()

if __name__ == "__main__" and sys.argv[1] == "0":  # the other program has nothing to do
    torch.multiprocessing.spawn(spawned, nprocs=2)
"""
)
# Which is not waited for before multiprocessing's finalizers.
IN_A_THREAD = SPAWNED.replace(
    "save(model, optimizer, expected)\n",
    "threading.Thread(target=save, args=(model, optimizer, expected)).start()\n        kept.append(optimizer)\n",
).replace("import io, os,", "import threading\nkept = []\nimport io, os,")


@pytest.mark.parametrize("script", [SPAWNED, IN_A_THREAD], ids=["", "by a thread"])
def test_ranks_that_are_spawned_are_read_too(script: str, tmp_path: Path) -> None:
    assert run_programs(script, tmp_path, "returns", "1", "60")[0] == "saved\n"


def start(source: str, folder: Path, how: str, stage: int, timeout: float) -> list[Program]:
    script = folder / "rank.py"
    script.write_text(source)
    return [Program(script, [f"{rank}", str(folder / "store"), how, f"{stage}", f"{timeout}"]) for rank in range(2)]


# Rank 1 is through, and rank 0 sleeps.
STAYS = (
    SCRIPT
    + """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has it ignored
import zerox.ranks.ends
zerox.ranks.ends.SAY_AFTER_S = 0.2
model, optimizer = setup()
train(model, optimizer)
if rank == 0:
    time.sleep(120)
sys.stderr.write("is through\\n")
sys.stderr.flush()
if how == "raises":
    raise ValueError("at the end")
if "handled" in how:
    signal.signal(signal.Signals[how.split()[-1]], lambda *_: None)
"""
)


def ends_at_once(how: str, ranks: list[Program]) -> None:
    """Rank 1."""
    first, second = ranks
    try:
        lines = second.lines(60.0)
        assert "is through" in lines
        begun = time.monotonic()
        if how != "raises":
            assert "rank 1 has come to the end of its script, and stays for rank 0, which may read" in next(lines)
        if "SIG" in how:
            second.send_signal(signal.Signals[how.split()[-1]])
        elif how == "killed":
            first.send_signal(signal.SIGKILL)
        second.wait(20)
        assert time.monotonic() - begun < 10
        assert second.returncode == {"SIGTERM": -signal.SIGTERM, "raises": 1}.get(how, 0)
    finally:
        for each in (first, second):
            each.close()


@pytest.mark.parametrize(
    "how", ["SIGINT", "handled SIGINT", "SIGTERM", "handled SIGTERM", "killed", "timeout", "raises"]
)
def test_a_rank_that_stays_ends_at_once_where_nobody_reads_it(how: str, tmp_path: Path) -> None:
    ends_at_once(how, start(STAYS, tmp_path, how, 1, 2.0 if how == "timeout" else 60.0))


STEPS_ON = (
    SCRIPT
    + """
model, optimizer = setup()
train(model, optimizer)
if rank == 0:
    begun = time.monotonic()
    try:
        train(model, optimizer)
    except RuntimeError as error:
        assert "rank 1 has come to the end of its script" in str(error), error
        assert time.monotonic() - begun < 10
        print("raised")
"""
)
IN_A_BARRIER = STEPS_ON.replace("        train(model, optimizer)\n", "        dist.barrier()\n").replace(
    '"rank 1 has come to the end of its script" in str(error)', '"losed" in str(error)'
)


@pytest.mark.parametrize(
    ("script", "stage"), [(STEPS_ON, 3), (IN_A_BARRIER, 1)], ids=["in step()", "in a barrier of its own"]
)
def test_who_waits_for_a_rank_that_is_through_is_told_soon(script: str, stage: int, tmp_path: Path) -> None:
    assert run_programs(script, tmp_path, "ends", str(stage), "60")[0] == "raised\n"


PARENT = (
    SCRIPT.replace("rank, store, how, stage, timeout = int(sys.argv[1]),", "store, how, stage, timeout =")
    + """
def run(number):
    global rank, kept
    rank = number
    kept = setup()
    train(*kept)

if __name__ == "__main__" and sys.argv[1] == "0":
    child = torch.multiprocessing.get_context(how).Process(target=run, args=(1,))
    child.start()
    run(0)
    begun = time.monotonic()
    child.join()
    assert time.monotonic() - begun < 20
    print("joined")
"""
)


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_child_does_not_stay_for_its_parent(how: str, tmp_path: Path) -> None:
    assert run_programs(PARENT, tmp_path, how, "1", "60")[0] == "joined\n"


def state_of(optimizer: Any) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(each.values) for bucket in optimizer.inside.buckets for each in bucket.state.values()]


def deletes(rank: int, world_size: int, stage: int) -> None:
    """Rank 1 first; then all."""
    model, optimizer = made("fp32", stage)
    train(model, optimizer, rank, range(2))
    expected = full(optimizer)
    state = state_of(optimizer)
    if rank == 1:
        del optimizer
        gc.collect()
    dist.barrier()
    if rank == 0:
        assert_same(loaded(saved(optimizer.state_dict())), expected)
    dist.barrier()
    if rank == 0:
        del optimizer
        gc.collect()
        assert not any(each() is not None for each in state), "nobody else may read it"
    deadline = time.monotonic() + 20
    while any(each() is not None for each in state) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(each() is not None for each in state)
    del model
    dist.barrier()


@pytest.mark.parametrize("stage", [1, 2])
def test_deleted_state_is_kept_until_all_have_deleted_it(stage: int) -> None:
    run_ranks(deletes, 2, stage)
