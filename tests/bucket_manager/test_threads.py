"""Threads beside the one that trains: other ranks in one process, lookers-on, and backwards of their own.

See Note [Locks] in csrc/buckets/buckets.h."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of, same_bits
from tests.bucket_manager.training import Training, both_stages
from tests.ranks import run_ranks, run_threads
from zerox import FusedShardedAdam


def train(group: dist.ProcessGroup | None, rank: int, stage: int) -> list[Tensor]:
    model = Chain(4)
    optimizer = FusedShardedAdam(
        model.parameters(), lr=1e-2, process_group=group, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20
    )
    for seed in range(4):
        with optimizer.no_sync():
            model(input_of(rank, 2 * seed)).square().mean().backward()
        model(input_of(rank, 2 * seed + 1)).square().mean().backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def as_process(rank: int, _: int, stage: int) -> list[Tensor]:
    return train(None, rank, stage)


def as_thread(group: dist.ProcessGroup, stage: int) -> list[Tensor]:
    torch.set_num_threads(1)  # of this thread, as processes have: BLAS gives other bits with more
    return train(group, group.rank(), stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_four_threads_give_the_bits_of_four_processes(stage: int) -> None:
    threads = run_threads(as_thread, 4, stage)
    processes = run_ranks(as_process, 4, stage)
    for ours, theirs in zip(threads, processes, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(same_bits(a, b) for a, b in zip(ours, threads[0], strict=True))


@contextmanager
def looking_on(*looks: Callable[[], object]) -> Iterator[None]:
    """Threads of which each takes its look over and over. What one raises is raised at the end."""
    over = threading.Event()
    errors: list[BaseException] = []

    def look_again(look: Callable[[], object]) -> None:
        try:
            while not over.is_set():
                look()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look_again, args=(look,), daemon=True) for look in looks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a look never ended"
    assert not errors, errors


def train_watched(rank: int, _: int, stage: int, watched: bool) -> list[Tensor]:
    training = Training(rank, stage)
    manager = training.manager
    looks = (
        lambda: manager.backward.synced,
        lambda: manager.backward.launch_order,
        lambda: (manager.flights.num_launched, manager.flights.num_reduced),
        lambda: manager.synchronizer.holds_scaled,
        lambda: (manager.params.missing, manager.params.order_of_use),
    )
    with looking_on(*looks if watched else ()):
        for seed in range(12):
            training.backward(seed)
            # Python has seen these: whoever frees one needs the GIL, also under a lock that a look waits for.
            seen = [p.grad for p in training.model.parameters()]
            training.optimizer.clip_grad_norm_(0.05)
            training.optimizer.step()
            del seen
            training.optimizer.zero_grad(set_to_none=seed % 2 == 0)
    return training.snapshot()


@both_stages
def test_threads_that_look_on_neither_stop_nor_change_a_training(stage: int) -> None:
    watched = run_ranks(train_watched, 2, stage, True)
    for ours, alone in zip(watched, run_ranks(train_watched, 2, stage, False), strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, alone, strict=True))


def train_in_threads(rank: int, _: int, stage: int, num_threads: int) -> list[Tensor]:
    """A backward whose gradient leaves, and 16 through all layers inside no_sync(), by some threads at once. Gradients
    are whole numbers, whose sum is the same in any order."""
    training = Training(rank, stage)
    for param in training.model.parameters():  # the other threads come while one has written p.grad
        param.register_post_accumulate_grad_hook(lambda _: time.sleep(0.002))

    def backwards(seeds: range) -> None:
        for seed in seeds:
            x = torch.randint(-8, 8, (4, training.model.width), generator=torch.Generator().manual_seed(seed)) + rank
            sum(layer(x.float()).sum() for layer in training.model.layers).backward()

    for step in range(3):
        first_seed = 100 * step
        backwards(range(first_seed, first_seed + 1))
        training.optimizer.synchronize()
        with training.optimizer.no_sync():
            shares = [range(first_seed + 1 + first, first_seed + 17, num_threads) for first in range(num_threads)]
            threads = [threading.Thread(target=backwards, args=(share,)) for share in shares]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.snapshot()


@both_stages
def test_backwards_of_several_threads_at_once_add_to_what_has_left(stage: int) -> None:
    at_once = run_ranks(train_in_threads, 2, stage, 4)
    for ours, theirs in zip(at_once, run_ranks(train_in_threads, 2, stage, 1), strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
