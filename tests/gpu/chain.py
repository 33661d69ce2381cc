"""A model whose gradients no library computes, streams that fall away on the CPU, and a training loop over both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.own_state import own_state
from zerox import FusedShardedAdam

MIB = 2**20


class Scales(nn.Module):
    """``x * weight`` and a squashing after each: elementwise both ways and without a sum, so that nothing but IEEE
    arithmetic decides about the bits of gradients, on any device and stream."""

    def __init__(self, num_layers: int = 6, numel: int = 5000, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.randn(numel, generator=generator) for _ in range(num_layers))

    def used(self) -> Iterable[Tensor]:
        return self.weights

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.used():
            x = x * weight
            x = x / (x.abs() + 1.0)
        return x


def batch_of(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def train_scales(
    rank: int,
    device: str = "cpu",
    steps: int = 4,
    num_layers: int = 6,
    numel: int = 5000,
    dtype: torch.dtype = torch.float32,
    clip: float | None = 0.05,
    accumulate: int = 1,
    layers_in_bucket: float = 1.0,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Parameters, this rank's state and the norms after some steps of :class:`Scales`, on the CPU."""
    model = Scales(num_layers, numel).to(device, dtype)
    cap_mb = layers_in_bucket * numel * dtype.itemsize / MIB
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=cap_mb, **options)
    norms = []
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                y = model(batch_of(rank, accumulate * step + micro, numel, dtype).to(device))
                (y.float() * y.float()).sum().backward()
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    state = [value for each in own_state(optimizer).values() for _, value in sorted(each.items())]
    return cpu_copies(model.parameters()), cpu_copies(state), [float(norm) for norm in norms]


def cpu_copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


# ---- streams


class Lines:
    """Streams by number on a CUDA device; on the CPU all of them are the one line in which everything runs."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    def on(self, index: int | None) -> Any:
        """Makes stream ``index`` the current one; None: whichever is."""
        skip = index is None or not self.streams
        return contextlib.nullcontext() if skip else torch.cuda.stream(self.streams[index])

    def after_current(self, indices: Sequence[int]) -> None:
        """Streams ``indices`` wait for the current one."""
        for index in indices if self.streams else ():
            self.streams[index].wait_stream(torch.cuda.current_stream(self.device))

    def current_after(self, indices: Sequence[int]) -> None:
        for index in indices if self.streams else ():
            torch.cuda.current_stream(self.device).wait_stream(self.streams[index])

    def synchronize(self) -> None:
        if self.streams:
            torch.cuda.synchronize(self.device)


def sleep(device: torch.device, cycles: int) -> None:
    """Occupies the current stream: a thousand million cycles are about half a second."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


class Delay(torch.autograd.Function):
    """Passes values and gradients on; backward first sleeps on its stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        sleep(grad.device, ctx.cycles)
        return grad, None


def scribble(device: torch.device, numel: int, count: int) -> None:
    """Fills memory that the current stream may have again with NaN: it shows if somebody still needs what was there."""
    for tensor in [torch.empty(numel, device=device) for _ in range(count)]:
        tensor.fill_(torch.nan)
