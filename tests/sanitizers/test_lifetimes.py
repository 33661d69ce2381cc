"""What the random trainings of tests/properties leave out, for the sanitizers to watch: exceptions, deletion at any
moment, and tensors that outlive the optimizer. Ranks are threads."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bucket_manager.rig import Awkward, message_of
from tests.bucket_manager.training import Training, both_stages
from tests.ranks import run_threads
from zerox import FusedShardedAdam


def test_the_extension_is_the_sanitized_one() -> None:
    assert "cpp-address-undefined" in sys.modules["zerox._C"].__file__


def fail_and_go_on(group: dist.ProcessGroup, stage: int) -> None:
    training = Training(group.rank(), stage, group=group)
    for seed in range(6):
        fails = seed in (1, 4) and group.rank() == 1
        try:
            training.backward(seed, fail_in=seed % 3 if fails else None)
            message = message_of(training.optimizer.step)
        except ArithmeticError:
            message = message_of(training.optimizer.step)
        except RuntimeError as error:  # where gradients are whole, the others hear of it in backward
            message = str(error)
        training.optimizer.zero_grad()
        assert (message == "no error") == (seed not in (1, 4)), message


@both_stages
def test_exceptions_in_backward(stage: int) -> None:
    run_threads(fail_and_go_on, 2, stage)


def delete(group: dist.ProcessGroup, moment: str) -> None:
    """Rank 1 never runs the backward whose flights rank 0 has under way."""
    training = Training(group.rank(), stage=2, group=group)
    training.manager.flights.hold_back(moment == "held back")
    if moment == "after a step":
        training.backward(0)
        training.optimizer.step()
    elif group.rank() == 0:
        training.backward(0)
        if moment == "zeroed":
            training.optimizer.zero_grad()
    state = [stored.values for stored in training.optimizer.inside.buckets[0].state.values()]
    kept = [*state, *(param.grad for param in training.model.parameters())]
    model = training.model
    group.barrier().wait()
    del training
    gc.collect()
    model.zero_grad()
    model(torch.ones(2, model.width)).sum().backward()
    assert all(torch.isfinite(param.grad).all() for param in model.parameters())
    assert torch.isfinite(kept[0]).all()
    group.barrier().wait()


@pytest.mark.parametrize("moment", ["on the wire", "held back", "zeroed", "after a step"])
def test_deletion(moment: str) -> None:
    for _ in range(5):
        run_threads(delete, 2, moment)


def awkward(group: dist.ProcessGroup | None, dtype: torch.dtype, stage: int) -> None:
    model = Awkward(dtype)
    rank = 0 if group is None else group.rank()
    optimizer = FusedShardedAdam(model.parameters(), process_group=group, stage=stage, bucket_cap_mb=0.005)
    for step in range(3):
        with optimizer.no_sync():
            model(torch.arange(8), extra=rank == 0).backward()
        model(torch.arange(4, 12), extra=step == 1).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    optimizer.load_state_dict(optimizer.state_dict())


@both_stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_awkward_parameters(world_size: int, dtype: torch.dtype, stage: int) -> None:
    run_threads(awkward, world_size, dtype, stage)


def come_and_go(group: dist.ProcessGroup) -> None:
    """Sharded parameters, with room for two buckets: fetched, ahead too, written, whole for a while, and left whole."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    options: dict[str, Any] = {"stage": 3, "bucket_cap_mb": 0.005, "resident_mb": 0.015}
    optimizer = FusedShardedAdam(model.named_parameters(), process_group=group, **options)
    for _ in range(4):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with optimizer.whole():
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    del optimizer
    gc.collect()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize("exchange", ["direct", "messages"])
def test_sharded_parameters_come_and_go(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROX_EXCHANGE", exchange)
    run_threads(come_and_go, 2)
