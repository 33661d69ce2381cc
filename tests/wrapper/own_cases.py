"""Scripts whose optimizer has parameters that the wrapper leaves out: embedding tables of each rank, ignored layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.wrapper.twins import Case, Script, values_of

OWN_CASES: dict[str, Case] = {}
WIDTH = 16


def case(function: Case) -> Case:
    OWN_CASES[function.__name__] = function
    return function


class Recommender(nn.Module):
    """Ranks have other tables, and other numbers of them: rank 0 has one, rank 1 two; the last of three has none."""

    def __init__(self, script: Script, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(script.rank)
        count = 0 if script.rank == 2 else 1 + script.rank
        self.tables = nn.ModuleList(nn.Embedding(5 + script.rank, WIDTH, sparse=sparse) for _ in range(count))
        self.top = script.wrap(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.rank = script.rank

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + 10 * seed + self.rank)
        ids = torch.randint(0, 5, (8,), generator=generator)
        x = torch.randn(8, WIDTH, generator=generator)
        found: Tensor = self.top(x + sum(table(ids) for table in self.tables))
        return found

    def groups(self, **options: Any) -> list[dict[str, Any]]:
        return [{"params": list(self.tables.parameters()), **options}, {"params": list(self.top.parameters())}]


def trained(model: Recommender, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(step).square().mean().backward()
        optimizer.step()


@case
def tables_of_each_rank(script: Script) -> Sequence[Tensor]:
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(lr=0.02), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trained(model, optimizer)
    schedule.step()
    trained(model, optimizer, first=3)
    return values_of(model)


@case
def ignored_layers_among_others(script: Script) -> Sequence[Tensor]:
    """In one param group: a third layer that each rank keeps."""
    net = script.net()
    net.append(nn.Linear(1, 1))
    OfTorch._set_params_and_buffers_to_ignore_for_model(net, ["3.weight", "3.bias"])
    model = script.wrap(net)
    optimizer = script.optimizer(net.parameters(), lr=0.01, weight_decay=0.1)
    script.train(model, optimizer, steps=3)
    return values_of(net)


@case
def a_scaler_and_an_overflow(script: Script) -> Sequence[Tensor]:
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(step).square().mean()).backward()
        if step == 1:  # on all ranks
            model.top.module[0].weight.grad.mul_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return [torch.tensor(scaler.get_scale()), *values_of(model)]


@case
def a_group_that_is_added(script: Script) -> Sequence[Tensor]:
    model = Recommender(script)
    optimizer = script.optimizer(model.top.parameters(), lr=0.01)
    trained(model, optimizer, 1)
    optimizer.add_param_group({"params": list(model.tables.parameters()), "lr": 0.02})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    trained(model, optimizer, first=1)
    return values_of(model)


@case
def state_that_goes_on(script: Script) -> Sequence[Tensor]:
    first = Recommender(script)
    optimizer = script.optimizer(first.groups(), lr=0.01)
    trained(first, optimizer)
    weights, state = first.state_dict(), optimizer.state_dict()
    second = Recommender(script)
    second.load_state_dict(weights)
    later = script.optimizer(second.groups(), lr=0.01)
    trained(second, later, 1, first=9)
    second.load_state_dict(weights)
    later.load_state_dict(state)
    trained(second, later, first=3)
    return values_of(second)
