"""What users call on the wrapper that a framework has put around an optimizer, in the middle of a training."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import zerox
from zerox import FusedShardedAdam


def backward(model: nn.Module, rank: int, step: int) -> None:
    torch.manual_seed(100 * step + rank)
    model(torch.randn(2, 6)).square().mean().backward()


def zeroed(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    backward(model, rank, 5)
    wrapper.zero_grad(set_to_none=False)
    wrapper.zero_grad()
    backward(model, rank, 6)


def clipped(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    backward(model, rank, 5)
    assert wrapper.clip_grad_norm_(0.1) > 0.1
    wrapper.clip_grad_value_(0.01)


def accumulated(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    with wrapper.no_sync():
        backward(model, rank, 5)
    backward(model, rank, 6)
    wrapper.scale_grads_(0.5)


def unfrozen(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    """Found by a call on the wrapper, and no second time by step()."""
    model[0].requires_grad_(True)
    backward(model, rank, 5)
    wrapper.clip_grad_norm_(1.0)


def moved(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    model[2].weight.data = model[2].weight.detach().clone()
    backward(model, rank, 5)
    wrapper.clip_grad_norm_(1.0)


def added(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    new = nn.Parameter(torch.ones(3))
    wrapper.add_param_group({"params": [new], "lr": 0.5})
    (new.sum() * (rank + 1)).backward()
    backward(model, rank, 5)
    model.register_parameter("new", new)


def loaded(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    # Fabric's own state_dict() is whole on rank 0 and empty elsewhere.
    state = copy.deepcopy(getattr(wrapper, "optimizer", wrapper).state_dict())
    for group in state["param_groups"]:
        group["lr"] = 0.25
    wrapper.load_state_dict(state)
    assert wrapper.param_groups[0]["lr"] == 0.25
    backward(model, rank, 5)


def scheduled(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(wrapper, 0.5)
    backward(model, rank, 5)
    wrapper.step()
    scheduler.step()
    backward(model, rank, 6)


def consolidated(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    wrapper.consolidate_state_dict()
    state = wrapper._optimizer.state_dict() if hasattr(wrapper, "_optimizer") else wrapper.state_dict()
    if rank == 0:
        assert all(type(each["exp_avg"]) is Tensor for each in state["state"].values())
    backward(model, rank, 5)


def uneven(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    with wrapper.join():
        for step in range(2 + rank):
            backward(model, rank, step)
            wrapper.clip_grad_norm_(1.0)
            wrapper.step()
            wrapper.zero_grad()
    backward(model, rank, 5)


def uneven_in_torch_s_way(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    with Join([wrapper]):
        for step in range(2 + rank):
            backward(model, rank, step)
            wrapper.step()
            wrapper.zero_grad()
    backward(model, rank, 5)


def joined_together(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    with zerox.join([wrapper]):
        for step in range(2 + rank):
            backward(model, rank, step)
            zerox.clip_grad_norm_([wrapper], 1.0)
            wrapper.step()
            wrapper.zero_grad()
    backward(model, rank, 5)


def scaled(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    scaler = zerox.GradScaler("cpu", init_scale=16.0)
    torch.manual_seed(rank)
    scaler.scale(model(torch.randn(2, 6)).square().mean()).backward()
    scaler.unscale_(wrapper)
    wrapper.clip_grad_norm_(0.1)
    scaler.step(wrapper)
    scaler.update()
    wrapper.zero_grad()
    backward(model, rank, 5)


def closed(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    def closure() -> float:
        wrapper.zero_grad()
        backward(model, rank, 5)
        wrapper.clip_grad_norm_(0.1)
        return 7.0

    assert wrapper.step(closure) == 7.0
    backward(model, rank, 6)


def hooked(model: nn.Sequential, wrapper: Any, rank: int) -> None:
    seen: list[str] = []
    wrapper.register_step_pre_hook(lambda *_: seen.append("pre"))
    wrapper.register_step_post_hook(lambda *_: seen.append("post"))
    backward(model, rank, 5)
    wrapper.step()
    assert seen == ["pre", "post"]
    backward(model, rank, 6)


CASES = (
    zeroed,
    clipped,
    accumulated,
    unfrozen,
    moved,
    added,
    loaded,
    scheduled,
    consolidated,
    uneven,
    uneven_in_torch_s_way,
    joined_together,
    scaled,
    closed,
    hooked,
)


def train(rank: int, case: Any, wrap: Any) -> list[Tensor]:
    """Parameters, and on rank 0 moments, after a few steps with the ``case`` among them. ``wrap(optimizer)``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if case is unfrozen:
        model[0].requires_grad_(False)
    optimizer = FusedShardedAdam(model.parameters(), lr=0.1, stage=1 if case is added else 2)
    wrapper = wrap(optimizer)
    backward(model, rank, 0)
    wrapper.step()
    wrapper.zero_grad()
    case(model, wrapper, rank)
    wrapper.step()
    for index in range(2):
        wrapper.zero_grad()
        backward(model, rank, 7 + index)
        wrapper.clip_grad_norm_(1.0)
        wrapper.step()
    if dist.is_initialized():
        dist.barrier()
    whole = optimizer.full_state_dict()
    moments = [each["exp_avg"] for each in whole["state"].values()] if rank == 0 else []
    return [*(param.detach().clone() for param in model.parameters()), *moments]
