"""A small mixture of experts whose tokens go to the rank that has their expert, and its twin in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH, EXPERTS, ROWS = 12, 4, 6  # rows of a rank in a step


class Gathered(torch.autograd.Function):
    """All ranks' tokens."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed_own(grad, ctx.group), None


class Returned(torch.autograd.Function):
    """This rank's tokens from what each rank's experts made of all."""

    @staticmethod
    def forward(ctx: Any, of_all: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed_own(of_all, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def summed_own(of_all: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = of_all.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].clone()


class Mixture(nn.Module):
    """``group``: over which tokens go; None: all experts are here. Experts have the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH, bias=False) for i in range(EXPERTS)})
        self.out = nn.Linear(WIDTH, 1, bias=False)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x))
        odds = self.router(x).softmax(-1)
        gate, chosen = odds.max(-1)
        tokens = x if self.group is None else Gathered.apply(x, self.group)
        where = chosen.unsqueeze(-1).float()
        where = where if self.group is None else Gathered.apply(where, self.group)
        made = tokens * 0.0  # ranks whose experts have no token go along
        for name, expert in self.experts.items():
            mine = (where.squeeze(-1) == int(name)).nonzero().squeeze(-1)
            if len(mine) > 0:
                made = made.index_add(0, mine, torch.tanh(expert(tokens[mine])))
        made = made if self.group is None else Returned.apply(made, self.group)
        return self.out(x + gate.unsqueeze(-1) * made)

    @property
    def dense(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if not name.startswith("experts.")]

    @property
    def own(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if name.startswith("experts.")]


@dataclass(frozen=True)
class Places:
    """Rank r is (r // 2, r % 2) on (edp, ep)."""

    mesh: DeviceMesh

    @property
    def ep(self) -> dist.ProcessGroup:
        return self.mesh.get_group("ep")

    @property
    def edp(self) -> dist.ProcessGroup:
        return self.mesh.get_group("edp")


def twins(places: Places, dtype: torch.dtype = torch.float32) -> tuple[Mixture, Mixture]:
    """One whose experts are divided over ep, with other values of everything on ranks that get theirs from others."""
    torch.manual_seed(0)
    whole = Mixture().to(dtype)
    model = copy.deepcopy(whole)
    model.group = places.ep
    each = EXPERTS // places.ep.size()
    for name in list(model.experts):
        if int(name) // each != places.ep.rank():
            del model.experts[name]
    with torch.no_grad():
        for _, param in [*model.dense, *model.own]:
            param.add_(0.0 if dist.get_rank() < places.ep.size() else dist.get_rank())
        for _, param in model.dense if dist.get_rank() > 0 else ():
            param.add_(1.0)
    return model, whole


def batch(step: int, ranks: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    x = torch.randn(ranks * ROWS, WIDTH, generator=generator)
    return x, torch.randn(ranks * ROWS, 1, generator=generator)


def own_part(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def groups(model: Mixture, group: Any, **options: Any) -> list[dict[str, Any]]:
    return [{"params": model.dense}, {"params": model.own, "process_group": group, **options}]
