"""Who else hangs on a wrapped module: a wrapper before this one, and optimizers that step inside backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.wrapper.beside import data
from tests.wrapper.tables import ATOL, Tables, mean_of, words
from tests.wrapper.together import OnRanks, error_of
from tests.wrapper.twins import of_zerox
from zerox import DistributedDataParallel, FusedShardedAdam

on_ranks = OnRanks(__name__, 2)
answers = on_ranks.answers


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("on purpose")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = self.first(x)
        return self.second(Failing.apply(x) if fails else x)


@on_ranks
def removed(rank: int) -> list[Any]:
    """torch's test_ddp_remove_autograd_hooks: a backward that fails, and then another wrapper."""
    grads = []
    for cls in (OfTorch, DistributedDataParallel):
        torch.manual_seed(0)
        first = cls(Layers())
        said = error_of(lambda ddp=first: ddp(data(rank), True).sum().backward())
        assert "on purpose" in said, said
        first._remove_autograd_hooks()
        second = cls(first.module)
        second(data(rank, 1)).square().sum().backward()
        grads.append([param.grad.clone() for param in second.parameters()])
    return [torch.allclose(one, other, atol=1e-5) for one, other in zip(*grads, strict=True)]


def test_another_wrapper_may_follow_a_backward_that_failed() -> None:
    assert answers("removed") == [[True, True]] * 2


@on_ranks
def left_alone(rank: int) -> list[bool]:
    """Without another wrapper each rank has its own gradients, of tables too, and forwards go on."""
    ddp = DistributedDataParallel(Tables())
    ddp(words(rank, 0)).square().mean().backward()
    ddp._remove_autograd_hooks()
    ddp._remove_autograd_hooks()  # once more does nothing
    ddp.zero_grad()
    own = torch.autograd.grad(ddp.module(words(rank, 1)).square().mean(), [ddp.module.layer.weight])[0]
    ddp(words(rank, 1)).square().mean().backward()
    table = ddp.module.first.weight
    return [torch.equal(ddp.module.layer.weight.grad, own), not table._post_accumulate_grad_hooks]


def test_without_another_wrapper_nothing_is_averaged() -> None:
    assert answers("left_alone") == [[True, True]] * 2


@on_ranks
def held(rank: int) -> list[bool]:
    """An optimizer of zerox goes on averaging what it holds, and no_sync() of either wrapper keeps it."""
    found = []
    for stage in (1, 2):
        script = of_zerox(rank, stage)
        first = DistributedDataParallel(script.net())
        optimizer = script.optimizer(first.parameters())
        first._remove_autograd_hooks()
        for ddp in (first, DistributedDataParallel(first.module)):
            optimizer.zero_grad()
            [own] = torch.autograd.grad(script.loss(first.module), [first.module[0].weight])
            before = optimizer.inside.manager.flights.num_launched
            with ddp.no_sync():
                script.loss(ddp).backward()
            found.append(optimizer.inside.manager.flights.num_launched == before)
            script.loss(ddp).backward()
            whole = optimizer.full_grad(first.module[0].weight)
            found.append(torch.allclose(whole, 2 * mean_of(own), atol=ATOL))
    return found


def test_what_an_optimizer_holds_goes_on_being_averaged() -> None:
    assert answers("held") == [[True] * 8] * 2


INSIDE = "is updated inside backward, by each rank's own gradient (_apply_optimizer_in_backward())"


@on_ranks
def updated_inside(rank: int) -> dict[str, str]:
    """torch.optim inside backward: before the wrapper is built, after it, on one rank alone, of what is ignored."""

    def apply(params: Any) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})

    def made(**options: Any) -> tuple[nn.Module, DistributedDataParallel]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, DistributedDataParallel(model, **options)

    found = {}
    before = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    apply(before[1].parameters())
    found["before"] = error_of(lambda: DistributedDataParallel(before))
    found["not handed out"] = error_of(lambda: DistributedDataParallel(before, init_sync=False)(data(rank)))
    found["an optimizer"] = error_of(lambda: FusedShardedAdam(before.named_parameters()))
    model, ddp = made()
    apply(model[1].parameters())
    found["after"] = error_of(lambda: ddp(data(rank)))
    model, ddp = made()
    optimizer = FusedShardedAdam(ddp.parameters())
    apply(model[1].parameters())
    found["after an optimizer"] = error_of(lambda: ddp(data(rank)))
    del optimizer
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if rank == 1:
        apply(alone[1].parameters())
    found["on rank 1"] = error_of(lambda: DistributedDataParallel(alone))
    ignoring = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.weight", "1.bias"])
    apply(ignoring[1].parameters())
    found["ignored"] = error_of(lambda: DistributedDataParallel(ignoring)(data(rank)).sum().backward())
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("before", f"RuntimeError: zerox.DistributedDataParallel: parameter '1.weight' {INSIDE}"),
        ("not handed out", f"RuntimeError: zerox.DistributedDataParallel: parameter '1.weight' {INSIDE}"),
        ("after", f"RuntimeError: zerox.DistributedDataParallel: parameter '1.weight' {INSIDE}"),
        ("after an optimizer", f"RuntimeError: zerox.DistributedDataParallel: parameter '1.weight' {INSIDE}"),
        ("an optimizer", f"ValueError: zerox: parameter '1.weight' {INSIDE}"),
        ("on rank 1", "RuntimeError: zerox: ranks must agree: rank 0 has parameter '1.weight' of shape (2, 4)"),
        ("ignored", "no error"),
    ],
)
def test_optimizers_inside_backward_are_refused_on_all_ranks(name: str, words: str) -> None:
    for found in answers("updated_inside"):
        assert found[name].startswith(words)
