"""Trainings with two changed lines: who wraps, who updates, what is sent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.wrapper.twins import Case, Script, values_of

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def wrapped_before_the_optimizer(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    script.train(model, script.optimizer(model.parameters(), lr=0.01))
    return values_of(model)


@case
def wrapped_after_the_optimizer(script: Script) -> Sequence[Tensor]:
    net = script.net()
    optimizer = script.optimizer(net.parameters(), lr=0.01)
    model = script.wrap(net)
    with model.no_sync():
        script.loss(model).backward()
    script.loss(model, 1).backward()
    optimizer.step()
    return values_of(model)


@case
def loaded_on_rank_0_after_the_optimizer(script: Script) -> Sequence[Tensor]:
    net = script.net()
    optimizer = script.optimizer(net.parameters(), lr=0.01)
    if script.rank == 0:
        net.load_state_dict({name: torch.full_like(value, 0.25) for name, value in net.state_dict().items()})
    model = script.wrap(net)
    first = values_of(model)
    script.train(model, optimizer)
    return first + values_of(model)


@case
def moved_on_rank_0_after_the_optimizer(script: Script) -> Sequence[Tensor]:
    net = script.net()
    optimizer = script.optimizer(net.parameters(), lr=0.01)
    if script.rank == 0:
        for param in net.parameters():
            param.data = param.data.half().float() + 0.25
    model = script.wrap(net)
    script.train(model, optimizer)
    return values_of(model)


@case
def with_frozen_layers_in_no_optimizer(script: Script) -> Sequence[Tensor]:
    net = script.net()
    net[0].requires_grad_(False)
    model = script.wrap(net)
    script.train(model, script.optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01))
    return values_of(model)


@case
def with_random_buffers(script: Script) -> Sequence[Tensor]:
    net = script.net()
    net.register_buffer("scale", torch.randn(16, generator=torch.Generator().manual_seed(script.rank)))
    net.register_buffer("flags", torch.tensor([script.rank == 0, True]))
    model = script.wrap(net)
    script.train(model, script.optimizer(model.parameters()))
    return values_of(model)


@case
def with_an_optimizer_of_torch_beside(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    other = torch.optim.SGD(model.module[2].parameters(), lr=0.1, momentum=0.9)
    script.train(model, script.optimizer(model.module[0].parameters(), lr=0.01), other, steps=3)
    return values_of(model)


@case
def with_optimizers_of_torch_only(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    script.train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    return values_of(model)


@case
def accumulated_with_forwards_inside_no_sync(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync():
                loss = script.loss(model, 3 * step + micro)
            loss.backward()  # outside
        script.loss(model, 3 * step + 2).backward()
        optimizer.step()
    return values_of(model)


@case
def accumulated_by_the_attribute(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    for micro in range(3):
        model.require_backward_grad_sync = micro == 2
        script.loss(model, micro).backward()
    optimizer.step()
    return values_of(model)


@case
def two_forwards_of_which_one_is_sent(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    first = script.loss(model)
    with model.no_sync():
        second = script.loss(model, 1)
    (first + second).backward()
    optimizer.step()
    return values_of(model)


@case
def two_wrappers_that_decide_apart(script: Script) -> Sequence[Tensor]:
    one, other = script.wrap(script.net()), script.wrap(script.net(8))
    optimizer = script.optimizer([*one.parameters(), *other.parameters()], lr=0.01)
    sent = script.loss(one)
    with other.no_sync():
        kept = script.loss(other)
    (sent + kept).backward()
    script.loss(other, 1).backward()
    optimizer.step()
    return values_of(one) + values_of(other)


@case
def evaluated_between_micro_batches(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    with model.no_sync():
        script.loss(model).backward()
    with torch.no_grad():
        script.loss(model, 5)
    script.loss(model, 1).backward()
    optimizer.step()
    return values_of(model)


@case
def an_optimizer_that_takes_over_from_another_one(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    script.train(model, other)
    del other
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    script.train(model, optimizer, seed=2)
    del optimizer
    script.train(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=4)
    return values_of(model)


@case
def a_group_that_is_added(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    optimizer = script.optimizer(model.module[0].parameters(), lr=0.01)
    other = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    script.train(model, optimizer, other)
    optimizer.add_param_group({"params": list(model.module[2].parameters())})
    script.train(model, optimizer, seed=2)
    return values_of(model)


@case
def torch_s_clip_and_scaler(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(script.loss(model, step) * (float("inf") if step == script.rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        scaler.step(optimizer)
        scaler.update()
    return [norms[0], norms[2], torch.tensor(scaler.get_scale()), *values_of(model)]


class Branches(nn.Module):
    """Each rank takes another one of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.both = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.both[self.rank % 2](x)}


@case
def unused_parameters_and_torch_s_clip(script: Script) -> Sequence[Tensor]:
    torch.manual_seed(script.rank)
    model = script.wrap(Branches(script.rank), find_unused_parameters=True)
    optimizer = script.optimizer(model.parameters(), lr=0.01)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        model(script.data(step))["y"].square().mean().backward()
        assert all(param.grad is not None for param in model.parameters())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
    return norms + values_of(model)


@case
def unused_parameters_in_no_optimizer_of_zerox(script: Script) -> Sequence[Tensor]:
    torch.manual_seed(script.rank)
    model = script.wrap(Branches(script.rank), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(script.data(step))["y"].square().mean().backward()
        optimizer.step()
    return values_of(model)


@case
def copies_that_go_on(script: Script) -> Sequence[Tensor]:
    model = script.wrap(script.net())
    script.train(model, script.optimizer(model.parameters(), lr=0.01))
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    script.train(copied, script.optimizer(copied.parameters(), lr=0.01), seed=4)
    script.train(pickled, torch.optim.SGD(pickled.parameters(), lr=0.1), seed=8)
    return values_of(model) + values_of(copied) + values_of(pickled)
