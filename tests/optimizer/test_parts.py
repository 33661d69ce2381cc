"""The parts of an optimizer: what happens at a sync point, in which order, and who holds whom."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.calls.phases import ADOPTING, AFTER_SYNC, BEFORE_SYNC, Phases


def train(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def registered(phases: Phases) -> list[tuple[str, ...]]:
    return [tuple(each) for each in (phases.before, phases.adopt, phases.after)]


def test_phases_run_in_the_order_of_the_table_whoever_registers_first() -> None:
    phases, ran = Phases(), []
    orders = (BEFORE_SYNC, ADOPTING, AFTER_SYNC)
    calls = (phases.before_sync, phases.adopting, phases.after_sync)
    for order, register in zip(orders, calls, strict=True):
        for name in reversed(order):
            register(name, lambda _, name=name: ran.append(name))  # type: ignore[misc]
    visit: Any = None
    for of_kind in (phases.before, phases.adopt, phases.after):
        for phase in of_kind.values():
            phase(visit)
    assert ran == [*BEFORE_SYNC, *ADOPTING, *AFTER_SYNC]


def test_a_phase_has_a_place_of_its_own_in_the_table() -> None:
    phases = Phases()
    with pytest.raises(AssertionError, match="a new one"):
        phases.after_sync("a new one", print)
    phases.after_sync("rows", print)
    with pytest.raises(AssertionError, match="rows"):
        phases.after_sync("rows", print)


def recorded(optimizer: FusedShardedAdam) -> list[str]:
    """What runs in its sync points from now on."""
    ran: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return call(*args, **kwargs)

        return noting

    core = optimizer.inside
    for of_kind in (core.phases.before, core.phases.adopt, core.phases.after):
        for name, phase in of_kind.items():
            of_kind[name] = noted(name, phase)
    core.grads.sync = noted("sync_point", core.grads.sync)  # type: ignore[method-assign]
    return ran


def test_every_phase_of_the_table_runs_before_or_after_ranks_meet() -> None:
    model = nn.Linear(4, 4)
    optimizer = FusedShardedAdam(model.parameters())
    assert registered(optimizer.inside.phases) == [BEFORE_SYNC, ADOPTING, AFTER_SYNC]
    ran = recorded(optimizer)
    optimizer.synchronize()
    assert ran == [*BEFORE_SYNC, "sync_point", *AFTER_SYNC]


def test_news_are_adopted_between_two_meetings() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    optimizer = FusedShardedAdam(model.parameters())
    ran = recorded(optimizer)
    model.bias.requires_grad_(True)
    optimizer.synchronize()
    assert ran == [*BEFORE_SYNC, "sync_point", *ADOPTING, "sync_point", *AFTER_SYNC]
    assert not optimizer.inside.frozen


def refused_with_written_state(rank: int, world_size: int) -> list[object]:
    """Ranks wrote state, and can't take in what one of them made of its param groups."""
    model = nn.Linear(4, 4)
    optimizer = FusedShardedAdam(model.parameters())
    train(model, optimizer)
    params = optimizer.param_groups[0]["params"]
    before = optimizer.full_state(model.weight)["exp_avg"]
    found: list[object] = []
    for state in optimizer.state.values():
        if state:
            state["exp_avg"] = torch.full_like(state["exp_avg"], 7.0)
    optimizer.param_groups[0]["params"] = params[:1]
    with pytest.raises(RuntimeError, match="was taken out of param_groups"):
        optimizer.synchronize()
    views = [view for b in optimizer.inside.buckets for view in b.state["exp_avg"].tensors().values()]
    found.append(any(bool((view == 7.0).any()) for view in views))
    optimizer.param_groups[0]["params"] = params
    optimizer.zero_grad()
    after = optimizer.full_state(model.weight)["exp_avg"]
    return [*found, bool((before == 7.0).any()), bool((after == 7.0).all())]


def test_what_refuses_comes_before_what_changes_state() -> None:
    assert run_ranks(refused_with_written_state, 2) == [[False, False, True]] * 2


def use_all_of_it(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    train(model, optimizer)
    optimizer.overlap_gather(model)
    with optimizer.join():
        train(model, optimizer)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})
    optimizer.full_grad(model.weight)  # type: ignore[arg-type]
    optimizer.set_full_state_(model.weight, step=7)  # type: ignore[arg-type]
    optimizer.load_state_dict(optimizer.state_dict())
    zerox.Sparsity(optimizer, {"weight": 0.5})
    train(model, optimizer)


def own_attributes(optimizer: FusedShardedAdam) -> dict[str, int]:
    of_torch = vars(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    return {name: id(value) for name, value in vars(optimizer).items() if name not in of_torch}


def test_calls_set_no_attribute_of_the_optimizer() -> None:
    """They would set those of a wrapper of it, which step() does not see: Note [Parts of an optimizer]."""
    model = nn.Linear(4, 4)
    optimizer = FusedShardedAdam(model.named_parameters())
    before = own_attributes(optimizer)
    assert "_core" in before
    use_all_of_it(model, optimizer)
    assert own_attributes(optimizer) == before


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_goes_with_its_parts_when_its_user_lets_go_of_it(stage: int) -> None:
    """And not when the garbage collector comes: its hooks on the parameters would still run."""
    model = nn.Linear(4, 4)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    use_all_of_it(model, optimizer)
    core = optimizer.inside
    parts = [optimizer, core, core.grads, core.calls, core.loading, core.joining, core.groups]
    references = [weakref.ref(part) for part in parts]
    gc.collect()
    gc.disable()
    try:
        del optimizer, core, parts
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()
