"""Hooks of torch.optim.Optimizer run here when, in what order and with what they run in torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from zerox import FusedShardedAdam

Build = Callable[..., torch.optim.Optimizer]
BUILDERS: list[Build] = [FusedShardedAdam, lambda params: torch.optim.AdamW(params, foreach=False)]


def build(make: Build) -> tuple[nn.Linear, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    return model, optimizer


def order_of_step_hooks(make: Build) -> list[Any]:
    model, optimizer = build(make)
    seen: list[Any] = []
    weight = model.weight.detach().clone()

    def note(name: str) -> Callable[..., None]:
        def hook(given: Any, args: Any, kwargs: Any) -> None:
            seen.append((name, given is optimizer, len(args), dict(kwargs), torch.equal(model.weight, weight)))

        return hook

    handles = [
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_post_hook(note("global post")),
        optimizer.register_step_pre_hook(note("pre 1")),
        optimizer.register_step_pre_hook(note("pre 2")),
        register_optimizer_step_pre_hook(note("global pre")),
    ]
    try:
        optimizer.step()
        seen.append("again")
        handles[2].remove()
        optimizer.step(closure=None)
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    return seen


def test_step_hooks_run_in_torch_s_order_around_the_update() -> None:
    ours, theirs = (order_of_step_hooks(make) for make in BUILDERS)
    assert ours == theirs
    assert [each[0] for each in ours[:5]] == ["global pre", "pre 1", "pre 2", "post", "global post"]


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("whose", ["its own", "of all optimizers"])
def test_one_hook_alone_is_run(when: str, whose: str) -> None:
    """Where there is none, step() does not look for them."""
    _, optimizer = build(FusedShardedAdam)
    of_all = {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}
    its_own = {"pre": optimizer.register_step_pre_hook, "post": optimizer.register_step_post_hook}
    seen = []
    handle = (its_own if whose == "its own" else of_all)[when](lambda *_: seen.append(when))
    try:
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert seen == [when]


def closure_from_a_hook(make: Build) -> list[Any]:
    """A pre-hook may replace the arguments of step()."""
    _, optimizer = build(make)
    handle = optimizer.register_step_pre_hook(lambda given, args, kwargs: ((given, lambda: 4.0), {}))
    returned = [optimizer.step()]
    handle.remove()
    optimizer.register_step_pre_hook(lambda *_: 5)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()
    return returned


def test_a_step_pre_hook_may_replace_the_arguments() -> None:
    ours, theirs = (closure_from_a_hook(make) for make in BUILDERS)
    assert ours == theirs == [4.0]


def order_of_state_dict_hooks(make: Build) -> list[str]:
    _, optimizer = build(make)
    optimizer.step()
    seen = []

    def replace(given: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("replace")
        return {**state_dict, "tag": 1}

    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre, prepended"), prepend=True)
    optimizer.register_state_dict_post_hook(replace)
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append(f"post, {sorted(d)}"))
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append(f"prepended, {sorted(d)}"), prepend=True)
    assert optimizer.state_dict()["tag"] == 1
    return seen


def test_state_dict_hooks_run_in_torch_s_order() -> None:
    ours, theirs = (order_of_state_dict_hooks(make) for make in BUILDERS)
    assert ours == theirs
    assert len(ours) == 5


def order_of_load_hooks(make: Build) -> tuple[list[str], Tensor, float]:
    """The pre-hook changes what is loaded; the post-hook sees what was."""
    _, source = build(make)
    source.step()
    model, target = build(make)
    seen = []

    def replace(given: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("replace")
        state = {key: {**each, "exp_avg": each["exp_avg"] + 1} for key, each in state_dict["state"].items()}
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {"state": state, "param_groups": groups}

    def look(given: Any) -> None:
        seen.append(f"post: {given.param_groups[0]['lr']}, {given.state[model.weight]['exp_avg'].tolist()}")

    target.register_load_state_dict_pre_hook(replace)
    target.register_load_state_dict_pre_hook(lambda o, d: seen.append("prepended"), prepend=True)
    target.register_load_state_dict_post_hook(look)
    target.register_load_state_dict_post_hook(lambda o: seen.append("post, prepended"), prepend=True)
    target.load_state_dict(source.state_dict())
    return seen, target.state[model.weight]["exp_avg"].clone(), target.param_groups[0]["lr"]


def test_load_state_dict_hooks_run_in_torch_s_order_and_see_and_change_what_is_loaded() -> None:
    (ours, moment, lr), (theirs, their_moment, their_lr) = (order_of_load_hooks(make) for make in BUILDERS)
    assert ours == theirs
    assert torch.equal(moment, their_moment)
    assert lr == their_lr == 0.25
    assert [each.split(":")[0] for each in ours] == ["prepended", "replace", "post, prepended", "post"]


def test_the_profiler_sees_step_and_zero_grad_under_torch_s_names() -> None:
    _, optimizer = build(FusedShardedAdam)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        optimizer.step()
        optimizer.zero_grad()
    names = [event.name for event in prof.events()]
    assert names.count("Optimizer.step#FusedShardedAdam.step") == 1
    assert names.count("Optimizer.zero_grad#FusedShardedAdam.zero_grad") == 1


def test_the_profiler_s_entry_point_is_called_after_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = build(FusedShardedAdam)
    calls = []
    monkeypatch.setattr(optimizer, "_optimizer_step_code", lambda: calls.append(1))
    optimizer.step()
    assert calls == [1]
