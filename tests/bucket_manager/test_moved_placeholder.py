"""A placeholder goes along where its parameter is moved or copied; it keeps its meaning, and a copy has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import WIDTH, Chain, input_of, message_of, same_bits
from tests.bucket_manager.training import both_stages
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.grads.placeholder import ShardedGrad

# What leaves parameters as they were, but for a rounding.
MOVES: dict[str, Callable[[nn.Module], object]] = {
    "cpu()": lambda model: model.cpu(),
    "to the same dtype": lambda model: model.to("cpu", torch.float32),
    "half().float()": lambda model: model.half().float(),
    "bfloat16() and to() back": lambda model: model.bfloat16().to(torch.float32),
    "_apply()": lambda model: model._apply(lambda tensor: tensor.double()).float(),
    "share_memory()": lambda model: model.share_memory(),
    "deepcopy()": copy.deepcopy,
}


def values_only(move: Callable[[nn.Module], object], model: nn.Module) -> None:
    """What ``move`` does to parameters, without their gradients."""
    other = copy.deepcopy(model)
    move(other)
    for param, moved in zip(model.parameters(), other.parameters(), strict=True):
        param.data = moved.detach().clone()


def moved_and_stepped(rank: int, _: int, stage: int, name: str, who: str) -> None:
    found = []
    for is_twin in (False, True):
        model = Chain(2).bfloat16().half().float()  # so that values stay in the first step, at which ranks compare them
        optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
        for step in range(2):
            model(input_of(rank, step)).square().mean().backward()
            if who == "all" or rank == 0:
                if is_twin:
                    values_only(MOVES[name], model)
                else:
                    MOVES[name](model)
            for param in model.parameters():
                assert type(param.grad) is ShardedGrad
                assert (param.grad.dtype, param.grad.device) == (param.dtype, param.device)
            model(input_of(rank, 10 + step)).square().mean().backward()
            found.append(optimizer.clip_grad_norm_(1.0))
            optimizer.step()
            if step:
                optimizer.zero_grad()
        with optimizer.whole():
            found += [param.detach().clone() for param in model.parameters()]
    for one, other in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        assert same_bits(one, other)
    assert float(found[0]) > 0


@pytest.mark.parametrize("who", ["all", "rank 0"])
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_left_is_used_after_a_move(stage: int, name: str, who: str) -> None:
    run_ranks(moved_and_stepped, 2, stage, name, who)


def left_for_good(rank: int, _: int, stage: int) -> tuple[list[str], bool, bool]:
    model = Chain(2)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    model(input_of(rank, 0)).square().mean().backward()
    optimizer.step()
    state = optimizer.full_state_dict()
    if rank == 0:
        model.half()
        assert all(param.grad is not None and param.grad.dtype is torch.float16 for param in model.parameters())
    messages = [message_of(optimizer.step)]
    optimizer.zero_grad()
    messages.append(message_of(optimizer.synchronize))
    optimizer.zero_grad()
    kept = optimizer.full_state_dict()
    same = all(
        torch.equal(value, kept["state"][number][key])
        for number, each in state.get("state", {}).items()
        for key, value in each.items()
    )
    model.float()
    optimizer.zero_grad()
    model(input_of(rank, 1)).square().mean().backward()
    fits = all(param.grad is not None and param.grad.dtype is torch.float32 for param in model.parameters())
    optimizer.step()
    return messages, same, fits


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_that_has_left_is_named_by_the_next_step_and_its_state_can_be_saved(stage: int) -> None:
    """As frameworks save after they have moved the model to the CPU."""
    for rank, (messages, same, fits) in enumerate(run_ranks(left_for_good, 2, stage)):
        for message in messages:
            assert message.startswith("zerox: rank 0 can't go on: parameter 'layers."), message
            assert rank or f"is ({WIDTH}, {WIDTH}) of torch.float16 on cpu" in message or "(64,)" in message
        assert same
        assert fits


def left_with_gradients(rank: int, _: int, stage: int) -> list[str]:
    """Values and gradients of another shape, since there is but one device here on which they could be."""
    model = Chain(2)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    model(input_of(rank, 0)).square().mean().backward()
    optimizer.step()
    for param in model.parameters():
        param.data = param.data[:1].clone()
        if stage == 1:
            assert param.grad is not None
            param.grad.data = param.grad.data[:1].clone()
    state = optimizer.full_state_dict()
    assert rank or all(each["exp_avg"].any() for each in state["state"].values())
    return [message_of(optimizer.step)]


@both_stages
def test_the_state_of_a_model_that_has_left_with_its_gradients_can_be_saved(stage: int) -> None:
    for (message,) in run_ranks(left_with_gradients, 2, stage):
        assert "can't go on: parameter 'layers." in message, message


# ---- copies

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda grad: grad.double(),
    "another device": lambda grad: grad.to("meta"),
    "an empty one": torch.empty_like,
    "deepcopy()": copy.deepcopy,
}


@pytest.fixture
def trained() -> tuple[Chain, FusedShardedAdam]:
    model = Chain(2)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2)
    model(input_of(0, 0)).square().mean().backward()
    return model, optimizer


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_raises_where_it_is_read_or_written_and_says_whose_it_is(
    trained: tuple[Chain, FusedShardedAdam], name: str
) -> None:
    grad = trained[0].layers[0].weight.grad
    made = COPIES[name](grad)
    assert made is not grad
    assert type(made) is ShardedGrad
    assert made.shape == grad.shape
    uses: list[Callable[[], Any]] = [made.norm, made.zero_, lambda: made.mul_(2), made.tolist, made.clone]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"parameter 'layers\.0\.weight' .*only a copy of the placeholder"):
            use()


def test_a_copy_has_the_order_in_memory_that_is_asked_for() -> None:
    layer = nn.Conv2d(3, 4, 3)
    optimizer = FusedShardedAdam(layer.named_parameters())
    layer(torch.ones(1, 3, 5, 5)).sum().backward()
    assert optimizer is not None
    assert isinstance(layer.weight.grad, ShardedGrad)
    assert layer.weight.grad.to(memory_format=torch.channels_last).stride() == (27, 1, 9, 3)
    assert layer.weight.grad.double().stride() == layer.weight.stride()


def test_a_deep_copy_keeps_one_copy_of_what_is_shared(trained: tuple[Chain, FusedShardedAdam]) -> None:
    grad = trained[0].layers[0].weight.grad
    first, second = copy.deepcopy([grad, grad])
    assert first is second
    assert first is not grad


def test_a_tensor_that_is_no_module_s_is_copied_with_its_placeholder() -> None:
    """torch copies the gradients of plain tensors too."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = FusedShardedAdam([("weight", weight)])
    weight.sum().backward()
    copied = copy.deepcopy(weight)
    with pytest.raises(RuntimeError, match=r"parameter 'weight' .*only a copy .* needs zero_grad\(\) first"):
        copied.sum().backward()
    copied.grad = None
    copied.sum().backward()
    assert torch.equal(copied.grad, torch.ones(4))
    optimizer.step()
    assert not torch.equal(weight, copied)


def on_another_kind_of_device(rank: int, _: int) -> None:
    """The module gets new parameters there. The optimizer's own are as they were, as with torch's optimizers."""
    models = [Chain(2) for _ in range(2)]
    optimizers = [FusedShardedAdam(model.named_parameters(), lr=1e-2) for model in models]
    params = [list(model.parameters()) for model in models]
    for model in models:
        model(input_of(rank, 0)).square().mean().backward()
    models[0].to("meta")
    for param in models[0].parameters():
        assert type(param.grad) is ShardedGrad
        with pytest.raises(RuntimeError, match="only a copy of the placeholder"):
            param.grad.sum()
    for optimizer in optimizers:
        optimizer.step()
    assert all(same_bits(one, other) for one, other in zip(*params, strict=True))


def test_a_module_on_another_kind_of_device_gets_copies() -> None:
    run_ranks(on_another_kind_of_device, 2)


def copy_as_a_gradient(rank: int, _: int, stage: int) -> tuple[list[str], bool]:
    other = Chain(2)
    sharded = FusedShardedAdam(other.named_parameters(), lr=1e-2)
    other(input_of(rank, 0)).square().mean().backward()
    model = Chain(2)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    weight = model.layers[1].weight
    before = [param.detach().clone() for param in model.parameters()]
    if rank == 1:
        weight.grad = copy.deepcopy(other.layers[0].weight.grad)
    messages = [message_of(optimizer.step), message_of(lambda: optimizer.clip_grad_norm_(1.0))]
    optimizer.zero_grad()
    if rank == 1:
        weight.grad = other.layers[0].weight.grad  # another optimizer's own
    messages.append(message_of(optimizer.step))
    optimizer.zero_grad()
    untouched = all(same_bits(one, two) for one, two in zip(before, model.parameters(), strict=True))
    model(input_of(rank, 1)).square().mean().backward()
    optimizer.step()
    sharded.step()
    return messages, untouched


@both_stages
def test_a_copy_is_never_taken_for_a_gradient(stage: int) -> None:
    for messages, untouched in run_ranks(copy_as_a_gradient, 2, stage):
        for message in messages:
            assert message.startswith("zerox: rank 1 can't go on: parameter 'layers.1.weight' has a "), message
            assert "placeholder in p.grad that is not its own" in message
            assert "p.grad = None" in message
        assert untouched
