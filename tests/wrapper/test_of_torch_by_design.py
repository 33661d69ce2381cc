"""Where ours differs by design from what torch's own tests say of its DistributedDataParallel: docs/ddp-tests.md."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Once
from tests.wrapper import torch_models as models
from tests.wrapper.beside import KINDS, Case, Run, apart, data
from zerox import DistributedDataParallel, FusedShardedAdam


def changing(run: Run, find_unused: bool, **options: Any) -> None:
    """Layers that are used in one step and not in the next one, on one rank alone."""
    ways: list[tuple[int, ...]] = [(0,), (0, 1) if run.rank else (0,), (0,), (0, 1, 2)]
    losses = [lambda ddp, i=i, way=way: ddp(data(run.rank, i), *way).sum() for i, way in enumerate(ways)]
    run.train(models.Branches(), losses, find_unused_parameters=find_unused and not run.is_ours, **options)


def outside(run: Run) -> None:
    def loss(ddp: Any) -> torch.Tensor:
        outputs, layer = ddp(data(run.rank))
        return layer(outputs).square().sum()

    run.train(models.Outside(), [loss] * 2, find_unused_parameters=run.is_ours)


def reentrant(run: Run) -> None:
    """torch's class trains this with a static graph alone."""
    options = {"find_unused_parameters": True} if run.is_ours else {"static_graph": True}
    model = models.Checkpointed(reentrant=True)
    run.train(model, [lambda ddp: ddp(data(run.rank).requires_grad_()).square().sum()] * 3, **options)


# In torch's class this raises; ours trains as torch's does with find_unused_parameters or static_graph set right.
RAISES: dict[str, Case] = {
    "unused without find_unused_parameters": lambda run: changing(run, True),
    "another graph each step with static_graph": lambda run: changing(run, True, static_graph=run.is_ours),
    "a layer called outside of forward, with find_unused_parameters": outside,
    "checkpointed, reentrant, with find_unused_parameters": reentrant,
}


def all_trained(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {name: {} for name in RAISES}
    for name, case in RAISES.items():
        runs = {kind: Run(kind, rank) for kind in KINDS}
        for kind, run in runs.items():
            torch.manual_seed(0)
            try:
                case(run)
                run.present = []  # p.grad is on all ranks with find_unused_parameters alone
                if difference := apart(run, runs["torch"]):
                    found[name][kind] = difference
            except Exception:
                found[name][kind] = traceback.format_exc()
    return found


TRAINED = Once(all_trained, 2)


@pytest.mark.parametrize("name", RAISES)
def test_where_torchs_raises_it_trains(name: str) -> None:
    for found in TRAINED():
        assert found[name] == {}


def around(rank: int, world_size: int) -> dict[str, Any]:
    model = nn.Linear(4, 2, bias=False)
    ddp = DistributedDataParallel(model)
    optimizer = FusedShardedAdam(ddp.parameters(), stage=1)
    sums: list[float] = []
    for _ in range(2):
        (ddp.module if not sums else ddp)(torch.full((1, 4), rank + 1.0)).sum().backward()
        optimizer.synchronize()
        sums.append(float(model.weight.grad.sum()))
    asked: dict[str, Callable[[], object]] = {
        "logging data": ddp._get_ddp_logging_data,
        "fused optimizer": lambda: ddp._register_fused_optim(torch.optim.SGD, lr=0.1),
        "buffer hook": lambda: ddp._register_buffer_comm_hook(ddp, lambda *_: None),
        "update of the group": lambda: ddp._update_process_group(None),
        "mixed_precision": lambda: DistributedDataParallel(model, mixed_precision=object()),
        "hook that is none": lambda: ddp.register_comm_hook(None, 1),
    }
    found: dict[str, Any] = {"module's own forward": sums}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


AROUND = Once(around, 2)


def test_a_forward_of_the_module_itself_is_averaged() -> None:
    """torch's class leaves the first one's gradients each rank's own, until the next."""
    assert [found["module's own forward"] for found in AROUND()] == [[12.0, 24.0]] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("logging data", "NotImplementedError: zerox.DistributedDataParallel has no _get_ddp_logging_data"),
        ("fused optimizer", "NotImplementedError: zerox.DistributedDataParallel has no _register_fused_optim"),
        ("buffer hook", "NotImplementedError: zerox.DistributedDataParallel has no _register_buffer_comm_hook"),
        ("update of the group", "NotImplementedError: zerox.DistributedDataParallel has no _update_process_group"),
        ("mixed_precision", "ValueError: zerox.DistributedDataParallel does not take mixed_precision"),
        ("hook that is none", "TypeError: Communication hook must be callable"),
    ],
)
def test_what_it_has_not_is_refused_by_name(name: str, words: str) -> None:
    for found in AROUND():
        assert str(found[name]).startswith(words)
