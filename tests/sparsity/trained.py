"""A training with masks on ranks, and its twin: one process that masks gradients, parameters and state by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zerox
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD, Sparsity

CLASSES = {"adam": FusedShardedAdam, "sgd": FusedShardedSGD, "lion": FusedShardedLion}
STEPS = 9
MAX_NORM = 0.5


@dataclass(frozen=True)
class Case:
    rule: str = "adam"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=lambda: {"*.weight": 0.7})
    schedule: Any = None  # a function that makes it, and its arguments: schedules can't be sent
    scope: str = "tensor"
    pattern: tuple[int, int] | None = None

    def sparsity(self, optimizer: Any) -> Sparsity:
        schedule = self.schedule and getattr(zerox, self.schedule[0])(*self.schedule[1:])
        return Sparsity(optimizer, self.targets, schedule, self.scope, self.pattern)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parts in all places: over shards, inside one, in several buckets, and one that has no weight matched."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(40, 120), nn.GELU(), nn.Linear(120, 36), nn.LayerNorm(36), nn.Linear(36, 12))
    return made.to(dtype)


def batch(rank: int, world: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(step * world + rank)).to(dtype)


def optimizer_of(case: Case, module: nn.Module, **more: Any) -> Any:
    named = list(module.named_parameters())
    return CLASSES[case.rule](named, lr=3e-2, **(case.options | more))


@dataclass
class Trained:
    """By parameter's name, after each step; ``masks`` after each ``sparsity.step()``, ``start`` before the first."""

    grads: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    masks: list[dict[str, Tensor]] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)


def params_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def state_of(optimizer: Any, module: nn.Module) -> dict[str, dict[str, Tensor]]:
    names = [name for name, _ in module.named_parameters()]
    whole = optimizer.full_state_dict().get("state", {})
    return {names[number]: {key: torch.as_tensor(value) for key, value in of.items()} for number, of in whole.items()}


def train(rank: int, world: int, case: Case, stage: int, hidden: bool = False) -> Trained | None:
    module = model(case.dtype)
    optimizer = optimizer_of(case, module, stage=stage, bucket_cap_mb=0.01)
    if hidden:
        optimizer.overlap_gather(module)
    sparsity = case.sparsity(optimizer)
    found = Trained(start=sparsity.masks())
    for step in range(STEPS):
        module(batch(rank, world, step, case.dtype)).square().mean().backward()
        found.grads.append({name: optimizer.full_grad(p) for name, p in module.named_parameters()})
        found.norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        sparsity.step()
        found.masks.append(sparsity.masks())
        with optimizer.whole():
            found.params.append(params_of(module))
        for name, kept in found.masks[-1].items():
            assert not found.params[-1][name][~kept].any(), f"step {step}: {name} has values where it is masked"
        optimizer.zero_grad()
    found.reached = sparsity.sparsity()
    found.state = state_of(optimizer, module)
    return found if rank == 0 else None


def twin(case: Case, of: Trained) -> Trained:
    """With its gradients, and its masks after each step."""
    module = model(case.dtype)
    optimizer = optimizer_of(case, module, process_group="alone")
    masks = of.start
    found = Trained()

    def mask_all() -> None:
        for name, param in module.named_parameters():
            if name in masks:
                param.data.mul_(masks[name])
                for key, value in optimizer.state[param].items():
                    if value.dim() and not key.endswith("_scale"):
                        value.masked_fill_(~masks[name].reshape(value.shape), 0)

    mask_all()
    for grads, masks_then in zip(of.grads, of.masks, strict=True):
        for name, param in module.named_parameters():
            grad = grads[name].to(param.dtype)
            param.grad = torch.where(masks[name], grad, 0) if name in masks else grad
        found.norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        mask_all()
        masks = masks_then
        mask_all()
        found.params.append(params_of(module))
        optimizer.zero_grad()
    found.state = state_of(optimizer, module)
    return found
