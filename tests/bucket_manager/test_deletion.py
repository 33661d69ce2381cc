"""The end: deletion, with work in flight, in a forked child, and after the process group."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.bucket_manager.rig import input_of, message_of
from tests.bucket_manager.training import Training
from tests.ranks import run_ranks
from zerox.grads.placeholder import ShardedGrad
from zerox.ranks.group import find_ranks


def delete(rank: int, _: int, stage: int, moment: str) -> tuple[bool, ...]:
    training = Training(rank, stage)
    model, optimizer, manager = training.model, training.optimizer, training.manager
    training.backward(0)
    if moment == "after a step":
        optimizer.step()
    elif moment == "between two backwards":
        optimizer.synchronize()
        training.backward(1)
    elif moment == "after an exception":
        optimizer.zero_grad()
        with pytest.raises(ArithmeticError):
            training.backward(1, fail_in=1)
    bucket = optimizer.inside.buckets[0]
    watched = [weakref.ref(each) for each in (optimizer, manager, bucket, bucket.state["exp_avg"], bucket.segments)]
    del bucket
    dist.barrier()
    gc.collect()
    gc.disable()
    try:
        del training.optimizer, training.manager, training, optimizer, manager
        gone = all(ref() is None for ref in watched)
    finally:
        gc.enable()
    no_placeholders = not any(isinstance(p.grad, ShardedGrad) for p in model.parameters())
    model.zero_grad()
    model(input_of(rank, 5)).square().mean().backward()
    expected = torch.autograd.grad(model(input_of(rank, 5)).square().mean(), list(model.parameters()))
    no_hooks = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    return gone, no_placeholders, no_hooks


MOMENTS = ["after backward", "after a step", "between two backwards"]


@pytest.mark.parametrize(
    ("stage", "moment"), [*((stage, moment) for stage in (1, 2) for moment in MOMENTS), (2, "after an exception")]
)
def test_deletion_frees_memory_hooks_and_placeholders_without_the_collector(stage: int, moment: str) -> None:
    assert run_ranks(delete, 2, stage, moment) == [(True, True, True)] * 2


def delete_in_flight(rank: int, _: int, hold: bool) -> tuple[bool, bool, float]:
    """Rank 1 never runs the backward whose flights rank 0 has under way, and keeps its optimizer."""
    training = Training(rank, stage=2)
    training.manager.flights.hold_back(hold)
    if rank == 0:
        training.backward(0)
    in_flight = rank == 1 or training.manager.flights.num_reduced < training.manager.flights.num_launched
    ref = weakref.ref(training.optimizer)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        del training
    seconds = time.monotonic() - start
    dist.barrier()
    return in_flight, rank == 1 or ref() is None, seconds


@pytest.mark.parametrize("hold", [False, True])
def test_deletion_with_work_in_flight_does_not_wait_for_it(hold: bool) -> None:
    for in_flight, gone, seconds in run_ranks(delete_in_flight, 2, hold):
        assert in_flight
        assert gone
        assert seconds < 10


def fork_children(rank: int, _: int, moment: str) -> tuple[bool, str]:
    """The child drops its copy of the optimizer, as a data-loader worker does at its end."""
    training = Training(rank, stage=2)
    if moment != "before any backward":
        training.backward(0)
    if moment == "after a step":
        training.optimizer.step()
    ended = all(ends_within_10_s(fork_and_drop(training)) for _ in range(3))
    return ended, message_of(training.optimizer.step)


def fork_and_drop(training: Training) -> int:
    child = os.fork()
    if child == 0:
        try:
            vars(training).clear()
            gc.collect()
        finally:
            os._exit(0)
    return child


def ends_within_10_s(child: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0] != 0:
            return True
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("moment", ["before any backward", "after backward", "after a step"])
def test_a_forked_child_that_drops_the_optimizer_does_not_hang(moment: str) -> None:
    assert run_ranks(fork_children, 2, moment) == [(True, "no error")] * 2


def destroy_group_first(rank: int, _: int) -> bool:
    training = Training(rank, stage=2)
    training.backward(0)
    training.optimizer.step()
    dist.destroy_process_group()
    ref = weakref.ref(training.optimizer)
    del training
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the pool to destroy
    return ref() is None


def test_the_process_group_may_be_destroyed_first() -> None:
    assert run_ranks(destroy_group_first, 2) == [True, True]


def let_go_of_groups(_: int, __: int) -> None:
    for _ in range(20):
        ranks = find_ranks(None)
        failure_detector = ranks.failure_detector
        assert failure_detector is not None
        assert ranks.control is not None
        for _ in range(4):
            values = torch.ones(1000)
            work = ranks.control.allreduce([values])
            failure_detector.await_(work)
            del work, values  # gloo's thread may be the last that has them, and wants the GIL to let go
        del ranks
        del failure_detector  # ends the group, and waits for that thread


def test_who_ends_a_group_does_not_keep_its_threads_from_the_interpreter() -> None:
    run_ranks(let_go_of_groups, 2, timeout_s=20)
