"""More of them: buffers, uneven batches, checkpointing, outputs and wrappers of other kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.wrapper.cases import case
from tests.wrapper.twins import Script, values_of


def normed(script: Script) -> nn.Module:
    torch.manual_seed(script.rank)
    # Without a bias, whose gradient batch norm makes rounding errors that Adam scales up.
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@case
def batch_norm(script: Script) -> Sequence[Tensor]:
    model = script.wrap(normed(script))
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    script.train(model, optimizer)
    model.eval()
    with torch.no_grad():
        for _ in range(1 + script.rank):  # rank 0's buffers are handed out once
            model(script.data())
    model.train()
    script.train(model, optimizer, seed=3)
    return [model(script.data(9)), *values_of(model)]


@case
def uneven_batches(script: Script) -> Sequence[Tensor]:
    model = script.wrap(normed(script))
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    with model.join():
        script.train(model, optimizer, steps=1 + script.rank)
    return values_of(model)


@case
def checkpointed(script: Script) -> Sequence[Tensor]:
    net = script.net()
    whole = nn.Sequential(Checkpointed(net[0]), *net[1:])
    model = script.wrap(whole, static_graph=True)
    script.train(model, script.optimizer(model.parameters(), lr=0.01))
    return values_of(model)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return found


@case
def gradient_penalty(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    other = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    optimizer = script.optimizer(model.module[0].parameters(), lr=0.01)
    for step in range(2):
        for each in (optimizer, other):
            each.zero_grad()
        x = script.data(step).requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm() + script.loss(model, step)).backward()
        for each in (optimizer, other):
            each.step()
    return values_of(model)


class Bag(dict):  # type: ignore[type-arg]
    """A subclass, as transformers' outputs are."""


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor, both: bool) -> Bag:
        y = self.first(x)
        return Bag(y=self.second(y) if both else y, first=self.first.weight)


@case
def outputs_in_a_class_of_its_own(script: Script) -> Sequence[Tensor]:
    torch.manual_seed(script.rank)
    model = script.wrap(Skips(), find_unused_parameters=True)
    optimizer = script.optimizer(model.module.first.parameters(), lr=0.01)
    other = torch.optim.SGD(model.module.second.parameters(), lr=0.1)
    for step in range(3):
        for each in (optimizer, other):
            each.zero_grad()
        model(script.data(step), both=not (script.rank == step == 1))["y"].square().mean().backward()
        for each in (optimizer, other):
            each.step()
    assert len(model.module.first.weight._backward_hooks or ()) <= 1, "they would be called for ever"
    return values_of(model)


@case
def two_wrappers_of_one_module(script: Script) -> Sequence[Tensor]:
    net = script.net()
    one, other = script.wrap(net), script.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with one.no_sync():
            script.loss(one, 2 * step).backward()
        script.loss(other if step % 2 else one, 2 * step + 1).backward()
        optimizer.step()
    return values_of(one)


@case
def parameters_put_in_place_of_the_module_s(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    others = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    found = torch.func.functional_call(model, others, (script.data(),)).square().mean()
    found.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    script.train(model, optimizer)
    return [param.grad for param in others.values() if param.grad is not None] + values_of(model)
