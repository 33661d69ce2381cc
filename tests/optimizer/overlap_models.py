"""Models whose modules run and read in all the ways that overlap_gather() has to follow, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from zerox import FusedShardedAdam

WIDTH = 72
CAP_MB = WIDTH * (WIDTH + 1) * 4 / 2**20  # a layer fills a bucket


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Backwards(nn.Module):
    """Runs its layers in the order opposite to that of their registration."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for each in reversed(self.layers):
            x = each(x).tanh()
        return x


class Skipping(Backwards):
    """Runs only some of its layers, other ones in each step."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        for index, each in enumerate(self.layers):
            if (index + step) % 3:
                x = each(x).tanh()
        return x


class Twice(Backwards):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.layers[0](self.layers[1](self.layers[0](x)).tanh() + self.layers[3](self.layers[2](x)))


class Outside(nn.Module):
    """Reads parameters where no module that owns them runs: before their owner does, instead of it, and in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused, self.third = layer(), layer(), layer(), layer()
        self.last = layer()
        self.last.weight = self.first.weight  # tied

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = F.linear(x, self.second.weight.t())
        x = self.first(x).tanh() + self.second(x)
        x = torch._foreach_mul([self.third.weight], 2.0)[0] @ x.t() if step % 2 else self.third(x).t()
        return self.last(x.t() @ self.unused.weight)


class Branching(nn.Module):
    """What runs in evaluation is not what runs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        if not self.training:
            return x @ self.layers[2].weight + self.layers[0](x)
        for each in self.layers:
            x = each(x).tanh()
        return x


class Borrowing(nn.Module):
    """Modules of torch's that read their children's parameters, lists of parameters, and computed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(layer())

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.attention(x[None])
        return self.normed(self.lstm(x)[0][0])


class Checkpointed(Backwards):
    use_reentrant = False

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = x.clone().requires_grad_()
        for each in self.layers:
            x = checkpoint(each, x, use_reentrant=self.use_reentrant).tanh()
        return x


class Reentrant(Checkpointed):
    use_reentrant = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * self.scale


class Blocks(nn.Module):
    """With a matrix that is also read before the blocks run that own it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_silence(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        torch.autograd._enable_record_function(False)
        try:
            return graph(*args)
        finally:
            torch.autograd._enable_record_function(True)

    return make_boxed_func(run)  # type: ignore[no-any-return]


# What it compiles calls no operators that a callback sees, as Inductor's kernels are none; but at no cost.
SILENT = aot_autograd(fw_compiler=in_silence)


def blocks_compiled_in_place() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=SILENT, fullgraph=True)
    return model


def blocks_compiled() -> nn.Module:
    model = Blocks()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=SILENT, fullgraph=True)  # type: ignore[assignment]
    return model


def compiled_in_place() -> nn.Module:
    model = Outside()
    model.compile(backend=SILENT, fullgraph=True)
    return model


def compiled_whole() -> nn.Module:
    return torch.compile(Outside(), backend=SILENT, fullgraph=True)  # type: ignore[return-value]


class Compiling(nn.Module):
    """Calls compiled functions that read others' parameters: with gradients, without, and a compiled block that does.

    The first function has a graph for each of two kinds of input, and breaks in between.
    """

    def __init__(self, backend: Any = SILENT) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = layer(), layer(), layer(), layer()
        others = [self.second, self.third]  # no submodules of what reads them

        def mixed(x: Tensor) -> Tensor:
            x = x @ others[0].weight
            torch._dynamo.graph_break()
            return x + others[1].bias

        @torch.no_grad()
        def size() -> Tensor:
            return sum(p.detach().square().sum() for p in others[1].parameters())  # type: ignore[return-value]

        def reading(x: Tensor) -> Tensor:
            return F.linear(x, self.fourth.weight) + others[0].bias

        self.mixed = torch.compile(mixed, backend=backend)
        self.size = torch.compile(size, backend=backend)
        self.reading = torch.compile(reading, backend=backend, fullgraph=True)

    def forward(self, x: Tensor, step: int) -> Tensor:
        if step % 2:
            x = x * self.size().rsqrt()
        x = self.mixed(x if step % 2 else x[: WIDTH // 2]).tanh()
        return self.reading(self.first(x)) * self.size()


EAGER: list[Callable[[], nn.Module]] = [
    *(Backwards, Skipping, Twice, Outside, Branching, Borrowing, Checkpointed, Reentrant, Blocks)
]
COMPILED: list[Callable[[], nn.Module]] = [
    *(blocks_compiled_in_place, blocks_compiled, compiled_in_place, compiled_whole, Compiling)
]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def build(make: Callable[[], nn.Module], overlap: bool, **options: Any) -> tuple[nn.Module, FusedShardedAdam]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = make()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=CAP_MB, **options)
    if overlap:
        optimizer.overlap_gather(model)
        optimizer.inside.manager.params.hold_back(True)
    return model, optimizer


def train_step(model: nn.Module, optimizer: FusedShardedAdam, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, step), step).square().mean().backward()
    optimizer.step()


def under_way(optimizer: FusedShardedAdam) -> int:
    return len(optimizer.inside.manager.params.missing)
