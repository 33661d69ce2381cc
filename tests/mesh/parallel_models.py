"""A small model, cut over a tensor axis, and its twin that is whole, trained beside torch.optim."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, LENGTH = 24, 16, 8
SEQUENCES = 8  # of a step, over all ranks


class Block(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """``idle``: takes part only where it is asked to."""

    def __init__(self, hidden: int = 32, bias: bool = False, scaled: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden, bias) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None
        self.idle = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, with_idle: bool = False) -> Tensor:
        x = self.embed(tokens)
        if self.scale is not None:
            x = x * self.scale
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if with_idle:
            x = x + self.idle(x)
        return self.head(x)


def cut(net: Net, axis: DeviceMesh, sequence: bool) -> Net:
    """Tensor parallel, or with ``sequence`` tokens too are divided over the axis between the blocks."""
    plan: dict[str, Any] = {
        # Local outputs would hide from torch how many columns each rank has, where these are uneven.
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1) if sequence else None, use_local_output=False),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
        "head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate(), use_local_output=True
        ),
    }
    if sequence:
        plan |= {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "norm": SequenceParallel(),
            "idle": SequenceParallel(),
        }
    return parallelize_module(net, axis, plan)


def batch(step: int, sequences: int = SEQUENCES) -> Tensor:
    return torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(100 + step))


def loss_of(net: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    scores = net(tokens, **options)
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Meshes:
    """Rank r has coordinates (r // 2, r % 2) on (dp, tp)."""

    both: DeviceMesh

    @property
    def dp(self) -> DeviceMesh:
        return self.both["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.both["tp"]


def twins(sequence: bool, meshes: Meshes, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, Net]:
    """A model that is cut, with other values of what is replicated on each rank but 0, and the same one whole."""
    torch.manual_seed(0)
    net = Net(**options).to(dtype)
    twin = copy.deepcopy(net)
    cut(net, meshes.tp, sequence)
    if dist.get_rank() > 0:
        with torch.no_grad():
            for param in net.parameters():
                if not any(each.is_shard() for each in getattr(param, "placements", ())):
                    local(param).add_(dist.get_rank())
    return net, twin
