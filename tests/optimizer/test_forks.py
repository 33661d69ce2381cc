"""A forked child reads whole parameters, hears in one line what it can't do, and its parents never notice it.

Gathers are held back: a bucket arrives when somebody waits for it, and not before.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from tests.children import in_a_child
from tests.optimizer.overlap_models import Backwards, batch, build, train_step, under_way
from tests.programs import run_programs
from tests.ranks import pool, run_ranks
from zerox import FusedShardedAdam

STEPS = 4
MANY_SECONDS = 10.0


@pytest.fixture(autouse=True, scope="module")
def _new_ranks() -> None:
    """In a child of a process in which autograd has had threads, by tests before, torch itself refuses a backward."""
    pool.close()


def values_of(params: Any) -> list[list[float]]:
    return [each.detach().reshape(-1).tolist() for each in params]


def read_in_all_ways(model: nn.Module, optimizer: FusedShardedAdam) -> list[Any]:
    """By operators, a copy, state_dict(), a forward and the optimizer's own state_dict()."""
    with torch.no_grad():
        found = [values_of(p + 0 for p in model.parameters()), values_of(copy.deepcopy(model).parameters())]
        found += [values_of(model.state_dict().values()), values_of([model(batch(0, 7), 0)])]
    return [*found, values_of(state["exp_avg"].own for state in optimizer.state_dict()["state"].values())]


def trained(rank: int, _: int, exchange: str, stage: int, forks: bool) -> tuple[list[Tensor], bool]:
    """The parameters after some steps, each followed by a child; and whether each child read what the parent had."""
    os.environ["ZEROX_EXCHANGE"] = exchange
    try:
        model, optimizer = build(Backwards, overlap=True, stage=stage)
    finally:
        del os.environ["ZEROX_EXCHANGE"]
    alike = True
    for step in range(STEPS):
        train_step(model, optimizer, rank, step)
        assert under_way(optimizer) > 0
        if forks:
            seen = in_a_child(lambda: (read_in_all_ways(model, optimizer), train_a_copy(model)))
            alike &= seen == (read_in_all_ways(model, optimizer), train_a_copy(model))
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()], alike


def train_a_copy(model: nn.Module) -> list[list[float]]:
    """What a child may: train a model of its own."""
    own = copy.deepcopy(model)
    optimizer = FusedShardedAdam(own.parameters(), process_group="alone")
    own(batch(0, 1), 0).square().mean().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return values_of(own.parameters())


@pytest.mark.parametrize(("exchange", "stage"), [("direct", 2), ("direct", 1), ("messages", 2), ("native", 2)])
def test_a_forked_child_reads_whole_parameters_and_its_parents_train_on(exchange: str, stage: int) -> None:
    found = run_ranks(trained, 2, exchange, stage, True)
    without = run_ranks(trained, 2, exchange, stage, False)
    for (params, alike), (expected, _) in zip(found, without, strict=True):
        assert alike
        assert all(map(torch.equal, params, expected))


def inside_no_sync(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    with optimizer.no_sync():
        model(batch(0, 0), 0).sum().backward()


Call = Callable[[nn.Module, FusedShardedAdam], object]
REFUSED: dict[str, Call] = {
    "step": lambda _, optimizer: optimizer.step(),
    "clip": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "unscale": lambda _, optimizer: optimizer.unscale_grads_(None),
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "backward": lambda model, _: model(batch(0, 0), 0).sum().backward(),
    "no_sync": inside_no_sync,
    "add_param_group": lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "overlap_gather": lambda model, optimizer: optimizer.overlap_gather(model),
    "broadcast_buffers": lambda model, optimizer: optimizer.broadcast_buffers(model),
    "full_state_dict": lambda _, optimizer: optimizer.full_state_dict(),
    "memory_bytes": lambda _, optimizer: optimizer.memory_bytes(),
    "save": lambda model, optimizer: zerox.save(Path(tempfile.gettempdir(), "never written"), model, optimizer),
    "load": lambda model, optimizer: zerox.load(Path(tempfile.gettempdir(), "never written"), model, optimizer),
    "construct": lambda model, _: FusedShardedAdam(copy.deepcopy(model).parameters()),
}
MOMENTS = ["at once", "after a backward", "after a step", "after a hidden step"]


def refusals(model: nn.Module, optimizer: FusedShardedAdam) -> dict[str, str]:
    """What each call says, or that it went through; then the optimizer goes, in whatever state."""
    said = {}
    for name, call in REFUSED.items():
        try:
            call(model, optimizer)
            said[name] = "no error"
        except Exception as error:
            said[name] = str(error)
    return said


def refused(rank: int, world_size: int, moment: str) -> tuple[dict[str, str] | str, float, bool]:
    """What the child heard, in how many seconds, and whether the parent's parameters are as without one."""
    model, optimizer = build(Backwards, overlap="hidden" in moment)
    twin, twin_optimizer = build(Backwards, overlap=False)
    for each, its in ((model, optimizer), (twin, twin_optimizer)):
        if moment != "at once":
            train_step(each, its, rank, 0)
        if moment == "after a backward":
            each(batch(rank, 1), 1).square().mean().backward()
    start = time.monotonic()
    said = in_a_child(lambda: refusals(model, optimizer))
    seconds = time.monotonic() - start
    for each, its in ((model, optimizer), (twin, twin_optimizer)):
        if moment == "after a backward":
            its.step()
        train_step(each, its, rank, 2)
        its.synchronize()
    return said, seconds, all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(("world_size", "moment"), [*((2, moment) for moment in MOMENTS), (1, "after a step")])
def test_what_a_forked_child_may_not_do_is_one_line_and_its_parents_train_on(world_size: int, moment: str) -> None:
    for said, seconds, unharmed in run_ranks(refused, world_size, moment):
        assert isinstance(said, dict), said
        for name, text in said.items():
            assert "was forked" in text, (name, text)
            assert 'process_group="alone"' in text, name
            assert "\n" not in text, name
        assert seconds < MANY_SECONDS
        assert unharmed


def fork_unknown_to_python() -> int:
    return int(ctypes.CDLL(None).fork())


def read_after_a_fork_of_c(model: nn.Module) -> tuple[list[str], list[str]]:
    """Errors of what can raise, warnings of what can't; and a fork of its own waits for nothing."""
    assert in_a_child(lambda: "here") == "here"
    errors = []
    for read in (lambda: model(batch(0, 7), 0), model.state_dict):
        try:
            read()
            errors.append("no error")
        except RuntimeError as error:
            errors.append(str(error))
    with tempfile.TemporaryFile() as told:
        os.dup2(told.fileno(), 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for param in model.parameters():
                param.sum()
        told.seek(0)
        return errors, [*told.read().decode().splitlines(), *(str(each.message) for each in caught)]


def forked_by_c(rank: int, _: int) -> tuple[Any, bool, bool]:
    model, optimizer = build(Backwards, overlap=True)
    train_step(model, optimizer, rank, 0)
    train_step(model, optimizer, rank, 1)
    waits = under_way(optimizer)
    subprocess.run(["true"], check=True)  # is no reason to wait
    seen = in_a_child(lambda: read_after_a_fork_of_c(model), fork=fork_unknown_to_python)
    return seen, under_way(optimizer) == waits > 0, train_on(model, optimizer, rank)


def train_on(model: nn.Module, optimizer: FusedShardedAdam, rank: int) -> bool:
    train_step(model, optimizer, rank, 2)
    optimizer.synchronize()
    return all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_child_of_a_fork_that_python_does_not_know_of_is_told_what_had_not_arrived() -> None:
    for seen, still_held, trains in run_ranks(forked_by_c, 2):
        errors, warned = seen
        for text in errors:
            assert "were on their way when this process was forked" in text
            assert "layers." in text
            assert "optimizer.synchronize() before such a fork" in text
        assert [text for text in warned if "their values are partly old" in text]
        assert still_held
        assert trains


def thrown_away(rank: int, _: int) -> tuple[Any, bool]:
    """What a child says whose garbage has an optimizer and its group, which has ended."""
    group = dist.new_group([0, 1])
    gc.disable()
    try:
        model, optimizer = build(Backwards, overlap=True, process_group=group)
        train_step(model, optimizer, rank, 0)
        train_step(model, optimizer, rank, 1)
        dist.destroy_process_group(group)
        garbage = [model, optimizer, group]
        garbage.append(garbage)
        del model, optimizer, group, garbage
        said = in_a_child(lambda: gc.collect() > 0)
    finally:
        gc.enable()
        gc.collect()
    dist.barrier()
    model, optimizer = build(Backwards, overlap=True)
    return said, train_on(model, optimizer, rank)


def test_a_child_s_garbage_never_ends_what_is_its_parents() -> None:
    assert run_ranks(thrown_away, 2) == [(True, True)] * 2


PROGRAM = """
import gc, multiprocessing, os, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.optimizer.overlap_models import Backwards, batch, build, train_step

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
model, optimizer = build(Backwards, overlap=True)


def work(x):
    with torch.no_grad():
        return float(model(batch(0, x), 0).sum())


def leave(how):
    global model, optimizer
    if how == "after a deletion":
        del model, optimizer
        gc.collect()
    if how == "after the end of its groups":
        dist.destroy_process_group()
    if how == "at once":
        os._exit(7)
    sys.exit(7)


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    children = {}
    train_step(model, optimizer, rank, 0)
    for how in ["at once", "", "after a deletion", "after the end of its groups"]:
        if rank == 0:  # the interpreter's end takes a second of a core
            children[how] = os.fork()
            if children[how] == 0:
                leave(how)
        train_step(model, optimizer, rank, 1)
    deadline = time.monotonic() + 60
    for how, child in children.items():
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ended != (0, 0), f"an exit {how} hangs"
        assert os.waitstatus_to_exitcode(ended[1]) == 7, (how, ended)
    train_step(model, optimizer, rank, 7)
    with fork.Pool(2) as pool:
        found = pool.map(work, range(4))
    assert found == [work(x) for x in range(4)]
    process = fork.Process(target=work, args=(1,))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    train_step(model, optimizer, rank, 8)
    optimizer.synchronize()
    print("trained on", flush=True)
    dist.destroy_process_group()
"""


def test_forked_children_end_in_all_ways_and_their_parents_train_on(tmp_path: Path) -> None:
    for printed in run_programs(PROGRAM, tmp_path):
        assert printed.splitlines()[-1] == "trained on", printed
