"""The handler of SIGSEGV is there while it may be needed, and lives with others' handlers."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.mortal_ranks import start_ranks
from tests.residency.models import Gpt, array, entropy
from tests.residency.rig import build, made, residents, train

NAME = "blocks.1.up.weight"
LIBC = ctypes.CDLL(None)
SIGACTION_BYTES = 152
ON_FAULT = ctypes.PYFUNCTYPE(None, ctypes.c_int)


def action() -> Any:
    """What the system does at SIGSEGV: a struct sigaction, which begins with the handler's address."""
    found = ctypes.create_string_buffer(SIGACTION_BYTES)
    assert LIBC.sigaction(signal.SIGSEGV, None, found) == 0
    return found


def handler() -> int:
    return int.from_bytes(action()[:8], "little")


def is_caught() -> bool:
    """As the system sees it."""
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return bool(int(status["SigCgt"], 16) >> (signal.SIGSEGV - 1) & 1)


def _and_meet(rank: int, world_size: int, function: Callable[..., str], *args: Any) -> str:
    """A rank must not end while the other one reads its shards."""
    said = function(rank, world_size, *args)
    dist.barrier()
    return said


def run_mortal(function: Callable[..., Any], folder: Path, *args: Any) -> None:
    """What a rank returns is an error's text, or nothing."""
    ranks = start_ranks(_and_meet, 2, function, *args, folder=folder / "ranks", timeout_s=60)
    try:
        assert [ranks.answer(rank, within_s=240) for rank in range(2)] == ["", ""]
    finally:
        ranks.close()


def end_of(body: Callable[[], Any]) -> tuple[int, str]:
    """How a forked child ends in which ``body`` runs, and what it wrote to the standard error."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writes, 2)
        body()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def bad_access() -> None:
    ctypes.string_at(0)


def assert_dies(with_traceback: bool, body: Callable[[], Any] = bad_access) -> None:
    code, said = end_of(body)
    assert code == -signal.SIGSEGV
    assert said.count("Fatal Python error: Segmentation fault") == with_traceback
    assert ("bad_access" in said) == (with_traceback and body is bad_access)


def assert_read_by_fault(model: Any, optimizer: Any, rank: int) -> None:
    """A step, in which ranges come and go, and a read of a released parameter."""
    train(model, optimizer, rank, entropy, steps=1)
    seen = array(model.get_parameter(NAME))
    expected = model.get_parameter(NAME).detach().clone().numpy()
    before = residents(optimizer).counts.faults
    residents(optimizer).release_all()
    assert np.array_equal(seen, expected)
    assert residents(optimizer).counts.faults > before


def come_and_go(rank: int, world_size: int) -> str:
    assert handler() == 0
    assert not is_caught()
    optimizers = [build(Gpt()), build(Gpt())]
    ours = handler()
    assert ours
    assert is_caught()
    del optimizers[0]
    assert handler() == ours
    optimizers.clear()
    assert handler() == 0
    assert not is_caught()
    model, optimizer = made()
    assert_read_by_fault(model, optimizer, rank)
    signal.signal(signal.SIGSEGV, signal.SIG_IGN)
    optimizer.whole().__enter__()
    del model, optimizer
    assert signal.getsignal(signal.SIGSEGV) is signal.SIG_IGN, "an optimizer that goes leaves what others have set"
    return ""


def test_the_handler_comes_with_the_first_optimizer_and_goes_with_the_last(tmp_path: Path) -> None:
    run_mortal(come_and_go, tmp_path)


def only_stage_3(rank: int, world_size: int) -> str:
    optimizer = build(Gpt(), stage=2)
    assert handler() == 0
    del optimizer
    return ""


def test_stages_without_released_parameters_have_no_handler(tmp_path: Path) -> None:
    run_mortal(only_stage_3, tmp_path)


def over_an_early_one(rank: int, world_size: int) -> str:
    faulthandler.enable()
    theirs = handler()
    model, optimizer = made()
    assert handler() != theirs
    assert_read_by_fault(model, optimizer, rank)
    assert_dies(with_traceback=True)
    del model, optimizer
    assert handler() == theirs
    assert_dies(with_traceback=True)
    return ""


def test_a_handler_that_was_there_before_is_called_and_comes_back(tmp_path: Path) -> None:
    run_mortal(over_an_early_one, tmp_path)


def over_a_late_one(rank: int, world_size: int) -> str:
    model, optimizer = made()
    first = handler()
    for _ in range(3):
        faulthandler.enable()
        theirs = handler()
        assert_read_by_fault(model, optimizer, rank)
        second = handler()
        assert second not in (first, theirs)
        assert_read_by_fault(model, optimizer, rank)
        assert handler() == second, "once"
        assert_dies(with_traceback=True)
        faulthandler.disable()
        assert handler() == first, "theirs had ours as the one before"
        assert_read_by_fault(model, optimizer, rank)
        assert handler() == first
        assert_dies(with_traceback=False)
    faulthandler.enable()
    assert_read_by_fault(model, optimizer, rank)
    del model, optimizer
    assert handler() == theirs
    assert_dies(with_traceback=True)
    return ""


def test_a_handler_that_came_later_does_not_take_reads_away(tmp_path: Path) -> None:
    run_mortal(over_a_late_one, tmp_path)


def under_a_late_one(rank: int, world_size: int) -> str:
    """No range came or went since: theirs is on top, and has ours as the one before."""
    model, optimizer = made()
    faulthandler.enable()
    theirs = handler()
    assert_dies(with_traceback=True)
    del optimizer
    assert handler() == theirs
    assert_dies(with_traceback=True)
    model, optimizer = made()
    assert_read_by_fault(model, optimizer, rank)
    assert_dies(with_traceback=True)
    return ""


def test_a_handler_that_lies_over_ours_is_left_alone(tmp_path: Path) -> None:
    run_mortal(under_a_late_one, tmp_path)


def two_late_ones(rank: int, world_size: int) -> str:
    """The second has the function that lies over the first as the one before: a third function would have to follow."""
    model, optimizer = made()
    faulthandler.enable()
    assert_read_by_fault(model, optimizer, rank)
    before = action()
    on_fault = ON_FAULT(lambda _: LIBC.sigaction(signal.SIGSEGV, before, None))
    LIBC.signal.argtypes = [ctypes.c_int, ON_FAULT]
    LIBC.signal(signal.SIGSEGV, on_fault)
    theirs = handler()
    train(model, optimizer, rank, entropy, steps=1)
    assert handler() == theirs
    assert_dies(with_traceback=True)
    return ""


def test_a_third_handler_stays_on_top(tmp_path: Path) -> None:
    run_mortal(two_late_ones, tmp_path)


def put_back_and_return(rank: int, world_size: int, late: bool) -> str:
    """As handlers that let the fault happen again under the handler before."""
    said: list[bytes] = [b"theirs\n"]
    before = action()

    def on_fault(_: int) -> None:
        os.write(2, said[0])
        LIBC.sigaction(signal.SIGSEGV, before, None)

    kept = ON_FAULT(on_fault)
    LIBC.signal.argtypes = [ctypes.c_int, ON_FAULT]
    model, optimizer = made()
    if late:
        before = action()
        LIBC.signal(signal.SIGSEGV, kept)
    else:
        del optimizer
        LIBC.signal(signal.SIGSEGV, kept)
        model, optimizer = made()
    assert_read_by_fault(model, optimizer, rank)
    assert end_of(bad_access) == (-signal.SIGSEGV, "theirs\n")
    return ""


@pytest.mark.parametrize("late", [False, True])
def test_a_handler_that_puts_back_the_one_before_it_is_called_once(tmp_path: Path, late: bool) -> None:
    run_mortal(put_back_and_return, tmp_path, late)


def called_once(rank: int, world_size: int) -> str:
    """SA_RESETHAND: the system would take it away before the call."""
    kept = ON_FAULT(lambda _: os.write(2, b"theirs\n") and None)
    LIBC.sysv_signal.argtypes = [ctypes.c_int, ON_FAULT]
    LIBC.sysv_signal(signal.SIGSEGV, kept)
    model, optimizer = made()
    assert_read_by_fault(model, optimizer, rank)
    assert end_of(bad_access) == (-signal.SIGSEGV, "theirs\n")
    return ""


def test_a_handler_that_is_to_be_called_once_is(tmp_path: Path) -> None:
    run_mortal(called_once, tmp_path)


def sent(rank: int, world_size: int) -> str:
    """By kill(2): there is no instruction to run again."""

    def send() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    model, optimizer = made()
    assert_dies(with_traceback=False, body=send)
    del optimizer
    signal.signal(signal.SIGSEGV, signal.SIG_IGN)
    model, optimizer = made()
    assert end_of(send)[0] == 0
    assert_dies(with_traceback=False)
    assert_read_by_fault(model, optimizer, rank)
    return ""


def test_a_signal_that_somebody_sends_does_what_it_would_do(tmp_path: Path) -> None:
    run_mortal(sent, tmp_path)


def in_children(rank: int, world_size: int) -> str:
    model, optimizer = made()
    faulthandler.enable()
    train(model, optimizer, rank, entropy, steps=1)
    param = model.get_parameter(NAME)
    memory = array(param)
    residents(optimizer).release_all()
    ours = handler()

    def read() -> None:
        try:
            memory.sum()
            [None for _ in range(100)]
        except RuntimeError as error:
            os.write(2, str(error).encode())

    def delete() -> None:
        nonlocal optimizer
        del optimizer
        assert handler() == ours
        read()

    for body in (read, delete):
        code, said = end_of(body)
        assert code == 0, said
        assert "were released when this process was forked" in said
    assert_dies(with_traceback=True)
    assert_read_by_fault(model, optimizer, rank)
    return ""


def test_forked_children_have_the_handler_for_good(tmp_path: Path) -> None:
    run_mortal(in_children, tmp_path)


def threads(rank: int, world_size: int) -> str:
    """One reads by faults while others' handlers and optimizers come and go."""
    model, optimizer = made(hostile=True)
    memory, stop = array(model.get_parameter(NAME)), threading.Event()
    expected = memory.copy()
    wrong: list[int] = []

    def look() -> None:
        while not stop.is_set():
            residents(optimizer).release_all()
            wrong.extend(np.flatnonzero(memory != expected))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for _ in range(10):
            other = made()
            train(*other, rank, entropy, steps=1)
            del other
    finally:
        stop.set()
        reader.join()
    assert not wrong
    assert residents(optimizer).counts.faults > 10
    faulthandler.enable()
    assert_read_by_fault(model, optimizer, rank)

    def on_another_thread() -> None:
        thread = threading.Thread(target=bad_access)
        thread.start()
        thread.join()

    code, said = end_of(on_another_thread)
    assert code == -signal.SIGSEGV
    assert "bad_access" in said
    return ""


def test_threads_read_by_faults_while_optimizers_come_and_go(tmp_path: Path) -> None:
    run_mortal(threads, tmp_path)
