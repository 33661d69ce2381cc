"""What users of torch's ZeroRedundancyOptimizer rely on, for the fused optimizer and for classes inside.

The list is that of torch's own tests of it, less what it has and zerox does not: overlap with DistributedDataParallel
(whose reducer zerox replaces), join() and parameters_as_bucket_view.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler, ShardedOptimizer

# By name: what builds ours, and the class of torch's that it stands for, with its options.
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "FusedShardedAdam": (FusedShardedAdam, torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (ShardedOptimizer, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "RMSprop": (ShardedOptimizer, torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, params: Any, **more: Any) -> Any:
    made, cls, options = KINDS[kind]
    return made(params, **options, **more) if made is FusedShardedAdam else made(params, cls, **options, **more)


def torchs(kind: str, params: Any) -> Any:
    _, cls, options = KINDS[kind]
    return cls(params, **options)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 3))


def loss_of(model: nn.Module, rank: int = 0, step: int = 0) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()  # type: ignore[no-any-return]


def close(model: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in pairs)


# ---- construction


@each_kind
@pytest.mark.parametrize(
    ("params", "error"),
    [
        ([], ValueError),
        (torch.ones(3), TypeError),
        ([1, 2], TypeError),
        ([nn.Parameter(torch.ones(3)), "x"], TypeError),
        ([nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)], ValueError),
        ([torch.eye(3).to_sparse()], ValueError),
        ([{"params": [nn.Parameter(torch.ones(3))]}, {"parameters": []}], KeyError),
    ],
    ids=["none", "a tensor", "numbers", "a string", "integers", "sparse", "no params"],
)
def test_parameters_that_torch_refuses_are_refused(kind: str, params: Any, error: Any) -> None:
    with pytest.raises(error):
        build(kind, params)


@each_kind
def test_any_form_of_parameters_is_taken(kind: str) -> None:
    for form in (
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: iter([{"params": model[0].parameters()}, {"params": model[2].weight, "lr": 0.5}]),
    ):
        optimizer = build(kind, form(small()))
        assert optimizer.param_groups[-1]["lr"] in (0.01, 0.5)
        assert isinstance(optimizer, torch.optim.Optimizer)


# ---- steps


def follow(rank: int, world_size: int, kind: str, stage: int, closure: bool) -> None:
    """As one process that has all ranks' batches; and every rank has the same parameters."""
    model, twin = small(), small()
    ours, theirs = build(kind, model.parameters(), stage=stage), torchs(kind, twin.parameters())

    def backward(step: int) -> Tensor:
        ours.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    for step in range(4):
        if closure:
            returned = ours.step(lambda step=step: backward(step))
            assert torch.equal(returned, returned.detach())
        else:
            backward(step)
            assert ours.step() is None
        theirs.zero_grad()
        torch.stack([loss_of(twin, each, step) for each in range(world_size)]).mean().backward()
        theirs.step()
        assert close(model, twin), step
    flat = torch.cat([param.detach().view(-1) for param in model.parameters()])
    everyones = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everyones, flat)
    assert all(same_bits(flat, other) for other in everyones)


@each_kind
@pytest.mark.parametrize(("world_size", "stage", "closure"), [(2, 1, False), (2, 2, True), (3, 2, False)])
def test_steps_are_those_of_the_local_optimizer(kind: str, world_size: int, stage: int, closure: bool) -> None:
    run_ranks(follow, world_size, kind, stage, closure)


@each_kind
def test_zero_grad_takes_all_gradients_away(kind: str) -> None:
    model = small()
    optimizer = build(kind, model.parameters(), stage=1)
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def scheduled(rank: int, world_size: int, kind: str) -> None:
    model, twin = small(), small()
    ours, theirs = build(kind, model.parameters()), torchs(kind, twin.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.1) for each in (ours, theirs)]
    for step in range(3):
        for each, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss_of(each, 0, step).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        assert close(model, twin)


@each_kind
def test_a_schedule_reaches_the_update(kind: str) -> None:
    run_ranks(scheduled, 2, kind)


def uneven(rank: int, world_size: int, kind: str) -> None:
    """Groups of sizes that no rank's share fits, one of them with less than a rank would have, and one added later."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (9000, 7, 3, 4500, 33, 1)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]

    def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": of[:2]}, {"params": of[2:3], "lr": 0.1}, {"params": of[3:4], "weight_decay": 0.5}]

    ours, theirs = build(kind, groups(params)), torchs(kind, groups(twins))
    for step in range(4):
        if step == 2:
            for optimizer, of in ((ours, params), (theirs, twins)):
                optimizer.add_param_group({"params": of[4:], "lr": 0.02})
        for param, twin in zip(params, twins, strict=True):
            param.grad, twin.grad = (torch.full_like(param, 1.0 + step) for _ in range(2))
        ours.step()
        theirs.step()
        ours.zero_grad()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
    assert len(ours.param_groups) == 4
    held = torch.tensor(ours.memory_bytes().moments)
    everyones = [torch.empty_like(held) for _ in range(world_size)]
    dist.all_gather(everyones, held)
    assert len({int(each) for each in everyones}) == 1, "every rank keeps as much as the others"


@each_kind
@pytest.mark.parametrize("world_size", [2, 3])
def test_groups_of_any_size_and_groups_that_are_added_train(kind: str, world_size: int) -> None:
    run_ranks(uneven, world_size, kind)


# ---- state


def round_trip(rank: int, world_size: int, kind: str) -> None:
    """Into an optimizer with another rate and other parameters; both go on alike. What the user adds is kept."""
    model, other = small(0), small(1)
    first, second = build(kind, model.parameters()), build(kind, other.parameters())
    for each, optimizer in ((model, first), (other, second)):
        loss_of(each, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    first.param_groups[0]["lr"] = 0.003
    first.param_groups[0]["note"] = "kept"
    state = copy.deepcopy(first.state_dict())
    other.load_state_dict(model.state_dict())
    second.load_state_dict(state)
    assert second.param_groups[0]["lr"] == 0.003
    assert second.param_groups[0]["note"] == "kept"
    for each, optimizer in ((model, first), (other, second)):
        loss_of(each, rank, 1).backward()
        optimizer.step()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@each_kind
def test_state_goes_from_one_optimizer_to_another(kind: str) -> None:
    run_ranks(round_trip, 2, kind)


def consolidate(rank: int, world_size: int, kind: str) -> None:
    model = small()
    optimizer = build(kind, model.parameters())
    loss_of(model, rank).backward()
    optimizer.step()
    for to in range(world_size):
        full = optimizer.full_state_dict(to=to)
        optimizer.consolidate_state_dict(to=to)
        found = optimizer.state_dict()
        if rank == to:
            theirs = torchs(kind, small().parameters())
            theirs.load_state_dict(found)
            assert len(found["state"]) == len(list(model.parameters()))
            for number, state in full["state"].items():
                assert all(
                    torch.equal(torch.as_tensor(state[key]), torch.as_tensor(v))
                    for key, v in found["state"][number].items()
                )
    with pytest.raises(ValueError, match="to must be one of"):
        optimizer.consolidate_state_dict(to=world_size)


@each_kind
def test_state_is_collected_on_any_rank(kind: str) -> None:
    run_ranks(consolidate, 2, kind)


# ---- groups of ranks, loss scales


def some_ranks(rank: int, world_size: int, kind: str) -> bool:
    """Two of three ranks train, the third alone."""
    group: Any = dist.new_group([0, 1])
    model = small()
    optimizer = build(kind, model.parameters(), process_group=group if rank < 2 else "alone")
    loss_of(model, rank).backward()
    optimizer.step()
    twin = small()
    theirs = torchs(kind, twin.parameters())
    own = (0, 1) if rank < 2 else (2,)
    torch.stack([loss_of(twin, each) for each in own]).mean().backward()
    theirs.step()
    return close(model, twin)


@each_kind
def test_the_group_may_be_some_of_the_ranks(kind: str) -> None:
    assert run_ranks(some_ranks, 3, kind) == [True] * 3


def scaled(rank: int, world_size: int, kind: str) -> tuple[list[float], bool]:
    """An inf on rank 1 in the second step."""
    model = small()
    optimizer = build(kind, model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=100)
    values, scales = [], []
    for step in range(3):
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss_of(model, rank, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        values.append(model[0].weight.detach().clone())
    plain = small()
    other = build(kind, plain.parameters())
    for step in (0, 2):
        loss_of(plain, rank, step).backward()
        other.step()
        other.zero_grad()
    return scales, same_bits(values[0], values[1]) and close(model, plain)


@each_kind
def test_a_grad_scaler_skips_on_all_ranks(kind: str) -> None:
    assert run_ranks(scaled, 2, kind) == [([8.0, 4.0, 4.0], True)] * 2
