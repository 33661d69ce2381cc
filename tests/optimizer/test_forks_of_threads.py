"""Forks by another thread than the training's: children hang nowhere, and their parents train on."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
import torch.distributed as dist

from tests.children import in_a_child
from tests.optimizer.overlap_models import Backwards, build, train_step
from tests.ranks import run_ranks


def forked_by_a_thread(rank: int, _: int) -> tuple[set[Any], bool]:
    """What children said that another thread forked wherever the training was, and whether that went on.

    They ask nothing of torch: a lock of its own that the training's thread held stays held in them.
    """
    model, optimizer = build(Backwards, overlap=True)
    train_step(model, optimizer, rank, 0)
    said: set[Any] = set()
    over = threading.Event()

    def read() -> str:
        try:
            optimizer.inside.manager.params.missing  # noqa: B018
            return "known"
        except RuntimeError as error:
            return str(error)

    def fork() -> None:
        while not over.is_set():
            said.add(in_a_child(read))

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        for step in range(1, 60):
            train_step(model, optimizer, rank, step)
    finally:
        over.set()
        thread.join()
    train_step(model, optimizer, rank, 60)
    optimizer.synchronize()
    return said, all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_child_that_a_thread_forks_in_the_midst_of_a_step_never_hangs_in_zerox() -> None:
    for said, trains in run_ranks(forked_by_a_thread, 2):
        assert said
        for text in said:
            assert text == "known" or "when this process was forked" in text, text
        assert trains


def thrown_away_but_cached(rank: int, world_size: int) -> Any:
    """What a child says that another thread forks while this one's cache of DTensor's has a group that has ended."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu")
    train_step(*build(Backwards, overlap=True, process_group=group), rank, 0)
    distribute_tensor(torch.ones(3), mesh, [Replicate()]).detach()
    dist.destroy_process_group(group)
    del mesh, group
    gc.collect()
    said: list[Any] = []
    thread = threading.Thread(target=lambda: said.append(in_a_child(lambda: "answers")))
    thread.start()
    thread.join()
    return said


def test_a_child_without_the_thread_that_has_a_group_s_last_reference_answers() -> None:
    assert run_ranks(thrown_away_but_cached, 2) == [["answers"]] * 2
