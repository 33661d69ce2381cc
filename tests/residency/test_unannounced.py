"""Reads of released parameters that no operator shows: they find the values, or raise."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.residency.models import Gpt, array, entropy
from tests.residency.rig import build, made, residents, run_by_way, train, values

NAME = "blocks.1.up.weight"


def saved(param: nn.Parameter) -> Tensor:
    file = io.BytesIO()
    torch.save(param, file)
    return torch.load(io.BytesIO(file.getvalue()))


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": lambda param: param.detach().numpy(),
    "numpy of a kept view": lambda param: param.kept.numpy(),  # type: ignore[attr-defined]
    "tolist": lambda param: param.tolist(),
    "dlpack": lambda param: np.from_dlpack(param.detach()),
    "pickle": lambda param: pickle.loads(pickle.dumps(param)).detach(),
    "torch.save": lambda param: saved(param).detach(),
    "deepcopy": lambda param: copy.deepcopy(param).detach(),
    "data_ptr": array,
    "storage": lambda param: list(param.untyped_storage()),
}


def trained_and_released(rank: int) -> tuple[nn.Module, Any, nn.Parameter, Tensor]:
    """After a step: a released parameter with a view of it that somebody kept, and its values."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    param = model.get_parameter(NAME)
    param.kept = param.detach()  # type: ignore[attr-defined]
    expected = param.detach().clone()
    residents(optimizer).set_hostile(True)
    residents(optimizer).release_all()
    return model, optimizer, param, expected


def read(rank: int, world_size: int, name: str) -> None:
    _, optimizer, param, expected = trained_and_released(rank)
    found = READS[name](param)
    if name == "storage":
        assert bytes(found) == expected.numpy().tobytes()
    else:
        assert torch.equal(torch.as_tensor(np.asarray(found)), expected)
    residents(optimizer).release_all()
    assert param.shape == expected.shape
    assert repr(expected)[7:60] in repr(param.data)


@pytest.mark.parametrize("name", READS)
def test_python_reads_a_released_parameter(name: str) -> None:
    run_ranks(read, 2, name)


def keep_an_array(rank: int, world_size: int) -> None:
    model, optimizer = made()
    kept = model.get_parameter(NAME).detach().numpy()
    for _ in range(2):
        train(model, optimizer, rank, entropy, steps=1)
        residents(optimizer).release_all()
        assert np.array_equal(kept, values(model)[list(dict(model.named_parameters())).index(NAME)].numpy())


def test_an_array_that_was_made_before_a_release_shows_the_new_values() -> None:
    run_ranks(keep_an_array, 2)


def places(rank: int, world_size: int) -> None:
    """What autograd has saved is right as long as its storage is filled again, and no other takes its place."""
    model, optimizer = made(hostile=True)

    def look() -> list[tuple[int, int, int]]:
        return [(id(p), p.untyped_storage()._cdata, p.data_ptr()) for p in model.parameters()]

    before = look()
    train(model, optimizer, rank, entropy, steps=2)
    with optimizer.whole():
        assert look() == before
    assert look() == before


def test_objects_storages_and_addresses_stay() -> None:
    run_ranks(places, 2)


def write_to_a_pipe(rank: int, world_size: int) -> None:
    """The system's own read raises no signal."""
    model = Gpt()
    optimizer = build(model)
    memory = memoryview(array(model.get_parameter(NAME))).cast("B")
    residents(optimizer).release_all()
    ours, theirs = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(theirs, memory)
    os.close(ours)
    os.close(theirs)


def test_a_read_by_the_system_raises() -> None:
    run_ranks(write_to_a_pipe, 2)


def fork(rank: int, world_size: int, way: str) -> None:
    model, optimizer = made()
    expected = model.get_parameter(NAME).detach().clone()
    residents(optimizer).release_all()
    read_end, write_end = os.pipe()

    def child() -> str:
        try:
            param = model.get_parameter(NAME)
            found = param + 0 if way == "operator" else torch.from_numpy(array(param).copy())
            return "right" if torch.equal(found, expected) else "wrong"
        except RuntimeError as error:
            return str(error)

    if way == "whole":
        with optimizer.whole():
            pid = os.fork()
            if pid == 0:
                os.write(write_end, child().encode())
                os._exit(0)
    else:
        pid = os.fork()
        if pid == 0:
            os.write(write_end, child().encode())
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status), f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    said = os.read(read_end, 1 << 16).decode()
    os.close(read_end)
    os.close(write_end)
    if way == "whole":
        assert said == "right"
    else:
        assert NAME in said
        assert "were released when this process was forked" in said
    train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("way", ["operator", "no operator", "whole"])
def test_a_forked_child_reads_whole_parameters_and_raises_for_released_ones(way: str) -> None:
    run_ranks(fork, 2, way)


class ReadsAParameter(torch.utils.data.Dataset[Tensor]):
    def __init__(self, param: nn.Parameter) -> None:
        self.param = param

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.param[index].detach() + 0


INHERITED: list[ReadsAParameter] = []


def read_inherited() -> Tensor:
    return INHERITED[0][0]


def read_in_workers(rank: int, world_size: int) -> None:
    """A loader's worker sends the class of its error and its text, a pool's the error: both pickled."""
    model, optimizer = made()
    residents(optimizer).release_all()
    data = ReadsAParameter(model.get_parameter(NAME))
    told = f"{NAME}.* were released when this process was forked"
    with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork", timeout=30)
        with pytest.raises(RuntimeError, match=f"(?s)DataLoader worker.*{told}"):
            next(iter(loader))
        INHERITED.append(data)
        with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(RuntimeError, match=told) as raised:
            pool.apply_async(read_inherited).get(30)
        INHERITED.clear()
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), again.args) == (type(raised.value), (str(raised.value),))
    train(model, optimizer, rank, entropy, steps=1)


def test_an_error_in_a_loader_s_worker_arrives() -> None:
    run_ranks(read_in_workers, 2)


def segfault(rank: int, world_size: int) -> int:
    optimizer = build(Gpt())
    pid = os.fork()
    if pid == 0:
        import ctypes

        ctypes.string_at(0)
        os._exit(0)
    del optimizer
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_other_faults_end_the_process_as_ever() -> None:
    assert run_ranks(segfault, 2) == [-signal.SIGSEGV] * 2


def read_after_a_reset(rank: int, world_size: int, again: bool) -> None:
    """As Lightning resets all signals at the end of fit()."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    if again:
        del model, optimizer
        model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    seen = model.get_parameter(NAME).detach().numpy()
    expected = seen.copy()
    residents(optimizer).release_all()
    assert np.array_equal(seen, expected)


@pytest.mark.parametrize("again", [False, True], ids=["the same optimizer", "another optimizer"])
def test_a_handler_of_signals_that_was_taken_away_comes_back(again: bool) -> None:
    run_ranks(read_after_a_reset, 2, again)


class WritesByNumpy(torch.autograd.Function):
    """As a kernel without an operator, in a function that is given the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        array(param)[...] = 7
        return torch.zeros(())


def write_by_numpy(rank: int, world_size: int, released: bool, in_function: bool) -> None:
    model, optimizer = made()
    param = model.get_parameter(NAME)
    before = param.detach().clone()
    memory = array(param)
    if released:
        residents(optimizer).release_all()

    def write() -> None:
        if in_function:
            with torch.no_grad():
                WritesByNumpy.apply(param)
        else:
            memory[...] = 7
        [None for _ in range(100)]  # Python raises between two of its own instructions

    with pytest.raises(RuntimeError, match=rf"{NAME}.* were written without an operator .*whole\(\)"):
        write()
    residents(optimizer).release_all()
    assert torch.equal(param, before)
    with optimizer.whole():
        memory[...] = 7
    assert (param == 7).all()
    train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_a_write_that_no_operator_shows_raises(released: bool, in_function: bool) -> None:
    run_ranks(write_by_numpy, 2, released, in_function)


def collective(rank: int, world_size: int) -> None:
    model, optimizer = made()
    weight = model.get_parameter(NAME)
    with pytest.raises(RuntimeError, match=rf"collective of torch.distributed .*{NAME}.*whole"):
        dist.all_reduce(weight.data)
    with optimizer.whole():
        dist.all_reduce(weight.data)
        dist.broadcast(weight.data, 0)
    train(model, optimizer, rank, entropy, steps=1)


def test_a_collective_on_a_sharded_parameter_raises() -> None:
    run_ranks(collective, 2)


def compiled_write(rank: int, world_size: int) -> None:
    model = Gpt()
    optimizer = build(model)
    weight = model.get_parameter(NAME)

    @torch.compile
    def halve(values: Tensor) -> None:
        values.mul_(0.5)

    def write() -> None:
        with torch.no_grad():
            halve(weight)
            [None for _ in range(100)]

    with pytest.raises(RuntimeError, match="were written without an operator"):
        write()
    del optimizer


def test_a_compiled_write_raises() -> None:
    run_ranks(compiled_write, 2)


def read_on_a_thread_that_keeps_the_gil(rank: int, world_size: int) -> None:
    """numpy's tolist() reads with the GIL, while step() runs on another thread and needs it."""
    model, optimizer = made(hostile=True)
    memory, stop = array(model.get_parameter(NAME)), threading.Event()

    def look() -> None:
        while not stop.is_set():
            memory.tolist()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        train(model, optimizer, rank, entropy, steps=20)
    finally:
        stop.set()
        thread.join()
    assert residents(optimizer).counts.faults > 0


def test_a_thread_that_keeps_the_gil_does_not_stop_a_step() -> None:
    run_ranks(read_on_a_thread_that_keeps_the_gil, 2)


def read_what_is_on_its_way(rank: int, world_size: int) -> None:
    """Rank 1 stands still while an operator on another thread of rank 0's fetches a bucket from it."""
    processes: list[Any] = [None] * world_size
    dist.all_gather_object(processes, os.getpid())
    model, optimizer = made()
    if rank == 0:
        others = [p for p in model.parameters() if optimizer.inside.gather.segment_of(p).own.numel() == 0]
        param, expected = others[0], others[0].detach().clone()
        memory = array(param)
        fetches = residents(optimizer).counts.fetches
        residents(optimizer).release_all()
        os.kill(processes[1], signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (processes[1], signal.SIGCONT)).start()
        reader = threading.Thread(target=param.sum)
        reader.start()
        while residents(optimizer).counts.fetches == fetches:
            time.sleep(0.01)
        time.sleep(0.2)
        found = memory.copy()
        reader.join()
        assert np.array_equal(found, expected.numpy())
    dist.barrier()


def test_memory_of_a_bucket_that_is_on_its_way_is_not_read() -> None:
    run_ranks(run_by_way, 2, "messages", read_what_is_on_its_way)
