"""What forwards decide about the next backward, and ranks that decide otherwise."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.wrapper.twins import ATOL, of_torch, of_zerox, values_of
from zerox import DistributedDataParallel, FusedShardedAdam


def sent(model: nn.Module) -> bool:
    """Whether a backward has left: p.grad is a placeholder then."""
    grad = next(model.parameters()).grad
    return grad is not None and type(grad) is not torch.Tensor


def one_after_the_other(rank: int, world_size: int) -> dict[str, bool]:
    script = of_zerox(rank, 2)
    found = {}

    def fresh() -> tuple[DistributedDataParallel, FusedShardedAdam]:
        model = DistributedDataParallel(script.net())
        return model, script.optimizer(model.parameters())

    model, optimizer = fresh()
    with model.no_sync():
        loss = script.loss(model)
    loss.backward()
    found["a forward inside no_sync()"] = not sent(model)
    optimizer.synchronize()
    found["a call on the optimizer sends what was kept"] = sent(model)

    model, optimizer = fresh()
    loss = script.loss(model)
    with model.no_sync():
        loss.backward()
    found["a backward inside no_sync()"] = sent(model)

    model, optimizer = fresh()
    with optimizer.no_sync():
        script.loss(model).backward()
    found["inside optimizer.no_sync()"] = not sent(model)

    model, optimizer = fresh()
    script.loss(model.module).backward()
    found["a forward past the wrapper"] = sent(model)

    model, optimizer = fresh()
    loss = script.loss(model)
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    found["a second backward of one forward"] = sent(model)

    model, optimizer = fresh()
    with model.no_sync():
        script.loss(model)  # never used
    optimizer.synchronize()
    script.loss(model).backward()
    found["after a forward that was never used"] = sent(model)

    model, optimizer = fresh()
    with model.no_sync():
        loss = script.loss(model)
    model.reducer.prepare_for_backward([])  # as torch's pipeline stages and Lightning call it
    loss.backward()
    found["after reducer.prepare_for_backward()"] = sent(model)

    model, optimizer = fresh()
    with model.no_sync():
        script.loss(model)
    module = model.module
    gone = weakref.ref(model)
    del model
    found["the wrapper goes at once"] = gone() is None
    script.loss(module).backward()
    found["once the wrapper is gone"] = sent(module)

    net = script.net()
    optimizer = script.optimizer(net.parameters())
    model = DistributedDataParallel(net)
    with model.no_sync():
        script.loss(model).backward()
    found["a wrapper that is younger than the optimizer"] = not sent(model)
    gc.collect()
    return found


def test_what_is_sent() -> None:
    for found in run_ranks(one_after_the_other, 2):
        assert found == dict.fromkeys(found, True)


def otherwise(rank: int, world_size: int, stage: int) -> list[str]:
    """Rank 0 keeps its only backward, rank 1 sends it."""
    script = of_zerox(rank, stage)
    model = DistributedDataParallel(script.net())
    optimizer = script.optimizer(model.parameters())
    said = []
    try:
        model.require_backward_grad_sync = rank == 1
        script.loss(model).backward()
        optimizer.step()
    except RuntimeError as error:
        said.append(str(error))
    model.require_backward_grad_sync = True
    optimizer.zero_grad()
    script.train(model, optimizer)
    return [*said, "went on"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_decide_otherwise_raise_and_go_on(stage: int) -> None:
    for said, after in run_ranks(otherwise, 2, stage):
        assert "ran 0 synchronising backwards" in said
        assert after == "went on"


def unevenly(rank: int, world_size: int) -> list[list[Tensor]]:
    found = []
    for script in (of_torch(rank), *(of_zerox(rank, stage) for stage in (1, 2, 3)), None):
        left_over = script is None
        script = script or of_zerox(rank, 2)
        model = script.wrap(script.net(), find_unused_parameters=not left_over)
        optimizer = (torch.optim.AdamW if left_over else script.optimizer)(model.parameters(), lr=0.01)
        for micro in range(3 - 2 * rank):
            with model.no_sync():
                script.loss(model, micro).backward()
        script.loss(model, 9).backward()
        optimizer.step()
        found.append(values_of(model))
    return found


def test_ranks_may_keep_different_numbers_of_backwards() -> None:
    for expected, *ours in run_ranks(unevenly, 2):
        for values in ours:
            for value, other in zip(values, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=0, atol=ATOL)
