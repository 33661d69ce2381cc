"""What transformers has not: batch norm over all ranks on the CPU, and experts that are modules of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

NUM_EXPERTS = 6
VOCABULARY = 64


def sum_over_ranks(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """In rank order, so that ranks as threads give the bits that ranks as processes do."""
    if group is None:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    group.allgather([parts], [values.contiguous()]).wait()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class _SumOverRanks(torch.autograd.Function):
    """A collective of the user's in forward, and another one in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return sum_over_ranks(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_over_ranks(grad, ctx.group), None


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm whose statistics are those of all ranks' batches. torch's own has no CPU version."""

    group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1] * (self.group.size() if self.group else 1)
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        mean, mean_square = _SumOverRanks.apply(sums, self.group) / count
        var = mean_square - mean.square()
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * count / (count - 1), 0.1)
        scale = self.weight * (var + self.eps).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def sync_batch_norms(model: nn.Module) -> nn.Module:
    """Every BatchNorm2d inside becomes a SyncBatchNorm: the parameters and buffers are the same."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm
    return model


class ExpertModules(nn.Module):
    """A mixture of experts that are modules: those that no token goes to have no gradient at all.

    Of ``NUM_EXPERTS`` experts the last is never chosen.
    """

    def __init__(self, width: int = 32, hidden: int = 80) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gate = nn.Linear(width, NUM_EXPERTS - 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(NUM_EXPERTS)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                mixed = torch.where((chosen == index)[..., None], expert(x) * weight[..., None], mixed)
        return next_token_loss(self.head(x + mixed), tokens)


class TiedPerceptron(nn.Module):
    """The fewest kernels for a compiler to make of an embedding that is also the output's matrix."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(self.embedding(tokens)).tanh()
        return next_token_loss(F.linear(x, self.embedding.weight), tokens)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
