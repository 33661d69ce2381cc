"""A training with masks on ranks, and its twin: one process that masks gradients, parameters and state by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

import zerox
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD, Sparsity
from zerox.memory.forms import master_of

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


def expected_masks(
    case: Case, step: int, values: dict[str, Tensor], masks: dict[str, Tensor], grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """By torch's kthvalue and topk on whole tensors; ``step`` is counted from 1."""
    schedule = getattr(zerox, case.schedule[0])(*case.schedule[1:])
    if not schedule.changes(step):
        return masks
    found = {}
    for glob, target in case.targets.items():
        names = [name for name in masks if name == glob or fnmatchcase(name, glob)]
        for together in [names] if case.scope == "global" else [[name] for name in names]:
            ranked = torch.cat([torch.where(masks[name], values[name].abs(), -1).flatten() for name in together])
            kept, numel = int((ranked >= 0).sum()), ranked.numel()
            count = round(target * schedule.part(step) * numel)
            grown = {name: torch.zeros_like(masks[name]) for name in together}
            if schedule.grows_by == "gradient":
                [name] = together
                among = torch.where(masks[name], -1, grads[name].abs()).flatten()
                places = among.topk(min(int(schedule.renewed(step) * kept), numel - kept)).indices
                grown[name].view(-1)[places[among[places] > 0]] = True
                count += int(grown[name].sum())
            limit = ranked.kthvalue(count).values if count else torch.tensor(-1.0)
            for name in together:
                found[name] = (masks[name] & (values[name].abs() > limit)) | grown[name]
    return found


def exact(optimizer: Any, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    if "remainder" in state:
        return master_of(param.detach().view(-1), state["remainder"].view(-1)).view(param.shape)
    return (state["master"] if "master" in state else param.detach()).float().clone()


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
    for step, (grads, masks_then) in enumerate(zip(of.grads, of.masks, strict=True), 1):
        for name, param in module.named_parameters():
            grad = grads[name].to(param.dtype)
            param.grad = torch.where(masks[name], grad, 0) if name in masks else grad
        found.norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        mask_all()
        if case.schedule and case.schedule[0] != "set_":
            values = {name: exact(optimizer, param) for name, param in module.named_parameters()}
            expected = expected_masks(case, step, values, masks, grads)
            for name, kept in masks_then.items():
                assert torch.equal(kept, expected[name]), f"step {step}: {name}"
        masks = masks_then
        mask_all()
        found.params.append(params_of(module))
        optimizer.zero_grad()
    found.state = state_of(optimizer, module)
    return found
