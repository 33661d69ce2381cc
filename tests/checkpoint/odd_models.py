"""A model with every kind of tensor that files of weights must have right, and an optimizer that has trained it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerox import FusedShardedAdam
from zerox.residency.residency import Residency


class Odd(nn.Module):
    """Large and small parameters in many orders of memory, tied, frozen, empty, of other dtypes; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(40)
        self.turned = nn.Parameter(torch.randn(90, 70).t())
        self.cube = nn.Parameter(torch.randn(20, 30, 25).permute(1, 2, 0))
        self.inner = nn.Linear(130, 72)
        self.outer = nn.Linear(130, 72, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(70, 72)
        self.frozen.requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(7, 701).bfloat16())
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("place", torch.arange(6).view(2, 3).t())
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def made(seed: int = 0, steps: int = 2, **options: Any) -> tuple[Odd, FusedShardedAdam]:
    """In stage 3 with all that can be released released."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Odd()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, **{"bucket_cap_mb": 0.05, **options})
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.norm.num_batches_tracked += 3
    if isinstance(optimizer.inside.gather, Residency):
        optimizer.inside.gather.residents.release_all()
    return model, optimizer


def loss_of(model: nn.Module) -> Tensor:
    return torch.stack([p.float().square().sum() for p in model.parameters() if p.requires_grad]).sum()


def state_of(model: nn.Module, optimizer: FusedShardedAdam) -> dict[str, Tensor]:
    """Whole and contiguous, of tied ones the first: as safetensors would be given it."""
    found: dict[str, Tensor] = {}
    with optimizer.whole():
        names = {id(each): name for name, each in reversed(model.state_dict(keep_vars=True).items())}
        for name, value in model.state_dict(keep_vars=True).items():
            if names[id(value)] == name:
                found[name] = value.detach().clone(memory_format=torch.contiguous_format)
    return found
