"""Models that read parameters in every way that a released bucket has to be back for, and the losses that do it."""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """The output's weight is the embedding's. ``reentrant``: of its checkpoints; None: without."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(self.embedding(words))))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = F.one_hot(words, WORDS).float().reshape(2, 2, 8, 16)
        return self.head(self.second(F.relu(self.norm(self.first(x)))).mean((2, 3)))[:, None].expand(-1, 8, -1)


def array(tensor: Tensor) -> Any:
    """Its memory, as a kernel of somebody's own finds it: torch knows nothing of the read."""
    start = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(start, tuple(tensor.shape))


class Raw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ array(weight).T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        return torch.from_numpy(grads[0].numpy() @ array(weight)), flat.t() @ x.reshape(-1, x.shape[-1])


class RawKernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.1)
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return Raw.apply(self.embedding(words), self.weight)


class HiddenWrites(nn.Module):
    """Reads without any operator or announcement in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        largest = float(array(self.head.weight).max())
        return self.head(self.embedding(words) * self.scale) / largest


def entropy(model: Any, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def by_functional_call(model: Any, words: Tensor) -> Tensor:
    return entropy(lambda each: torch.func.functional_call(model, dict(model.named_parameters()), (each,)), words)


def outside_forward(model: Any, words: Tensor) -> Tensor:
    outside = F.linear(torch.ones(1, WIDTH), model.embedding.weight).sum()
    return entropy(model, words) + outside + model.blocks[0].up.weight.square().sum()


def under_autocast(model: Any, words: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return entropy(model, words)


def twice_differentiated(model: Any, words: Tensor) -> Tensor:
    loss = entropy(model, words)
    return loss + sum(
        grad.square().sum() for grad in torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    )


def two_forwards(model: Any, words: Tensor) -> Tensor:
    first, second = entropy(model, words), entropy(model, words.flip(0))
    return first + second


def per_sample(model: Any, words: Tensor) -> Tensor:
    def loss(params: Any, each: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (each,)), each)

    values = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, words)
    return sum(grad.mean() for grad in grads.values()) + entropy(model, words)


def after_a_forward_that_raised(model: Any, words: Tensor) -> Tensor:
    handle = model.norm.register_forward_pre_hook(_raise)
    with contextlib.suppress(KeyError):
        model(words)
    handle.remove()
    return entropy(model, words)


def _raise(*_: Any) -> None:
    raise KeyError


def after_evaluation(model: Any, words: Tensor) -> Tensor:
    with torch.no_grad():
        first = model(words)
    with torch.inference_mode():
        second = model(words)
    assert torch.equal(first, second)
    copied = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), model.parameters(), strict=True))
    assert torch.nn.utils.parameters_to_vector(model.parameters()).isfinite().all()
    return entropy(model, words) + model.embedding.weight[0, 0].item() * 1e-3


def with_a_hook_on_a_parameter(model: Any, words: Tensor) -> Tensor:
    handle = model.embedding.weight.register_hook(lambda grad: grad + model.norm.weight.mean() * 1e-3)
    loss = entropy(model, words)
    loss.register_hook(lambda _: None)
    del handle
    return loss


def without_optimized_execution(model: Any, words: Tensor) -> Tensor:
    """With it, two runs of one script differ in their last bits, whoever owns the parameters."""
    with torch.jit.optimized_execution(False):
        return entropy(model, words)


def compiled(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, **options)


def compiled_blocks(**options: Any) -> Callable[[nn.Module], Any]:
    def wrap(model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks").children():
            block.compile(**options)
        return model

    return wrap


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor] = entropy
    wrap: Callable[[nn.Module], Any] = lambda model: model


CASES = {
    "tied weights": Case(Gpt),
    "checkpoints": Case(lambda: Gpt(reentrant=False)),
    "checkpoints, reentrant": Case(lambda: Gpt(reentrant=True)),
    "reads outside a forward": Case(Gpt, outside_forward),
    "functional_call": Case(Gpt, by_functional_call),
    "autocast": Case(Gpt, under_autocast),
    "two forwards, one backward": Case(Gpt, two_forwards),
    "double backward": Case(Tanh, twice_differentiated),
    "vmap of grad": Case(Tanh, per_sample),
    "lstm": Case(Lstm),
    "convolution, batch norm": Case(Pixels),
    "function with raw kernels": Case(RawKernels),
    "raw reads in a forward": Case(HiddenWrites),
    "a forward that raised": Case(Gpt, after_a_forward_that_raised),
    "evaluation, deepcopy, item()": Case(Gpt, after_evaluation),
    "hooks": Case(Gpt, with_a_hook_on_a_parameter),
    "jit.script": Case(lambda: torch.jit.script(Tanh()), without_optimized_execution),
}
COMPILED = {
    "compiled": Case(Gpt, wrap=compiled()),
    "compiled by aot_eager": Case(Gpt, wrap=compiled(backend="aot_eager")),
    "blocks compiled by aot_eager": Case(Gpt, wrap=compiled_blocks(backend="aot_eager")),
    "checkpoints compiled by aot_eager": Case(lambda: Gpt(reentrant=False), wrap=compiled(backend="aot_eager")),
}
# How a model is cut into regions is Dynamo's part, which is alike under each backend; inductor's part, kernels that
# read parameters without operators, is in "compiled". Each of these runs a C++ compiler for every rank.
DEEP = {
    "compiled blocks": Case(Gpt, wrap=compiled_blocks()),
    "compiled checkpoints": Case(lambda: Gpt(reentrant=False), wrap=compiled()),
}
ALL = {**CASES, **COMPILED, **DEEP}
