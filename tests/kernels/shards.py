"""Shards for kernel tests: tensors as the optimizer makes them, without an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.kernels import stored
from zerox import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def options_table(
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    maximize: bool = False,
    decoupled: bool = True,
    amsgrad: bool = False,
) -> Tensor:
    row = [lr, *betas, eps, weight_decay, float(maximize), float(decoupled), float(amsgrad)]
    return torch.tensor([row], dtype=torch.float64)


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def segments_of(*numels: int, gap: int = 0) -> Tensor:
    """Segments one behind the other, ``gap`` elements of padding between them."""
    rows, start = [], 0
    for param, numel in enumerate(numels):
        rows.append([start, start + numel, 0, param, 0])
        start += numel + gap
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)


@dataclass
class Shard:
    """One shard with random contents. ``step`` updates were made before."""

    numel: int
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    master_kind: str | None = None
    amsgrad: bool = False
    step: int = 0
    seed: int = 0
    grad_size: float = 1.0
    segments: Tensor = field(default_factory=lambda: torch.empty(0, 5))
    state_dtype: torch.dtype = torch.float32  # torch.uint8: 8-bit codes; of fp64 parameters always float64

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(scale: float = 1.0) -> Tensor:
            return torch.randn(self.numel, generator=generator, dtype=torch.float64) * scale

        wide = moment_dtype(self.dtype)
        exact = random().to(wide)
        self.param = exact.to(self.dtype)
        self.grad = random(self.grad_size).to(self.grad_dtype or self.dtype)
        started = self.step > 0
        self.exp_avg = (random(0.1 * self.grad_size) * started).to(wide)
        self.exp_avg_sq = (random(self.grad_size).square() * 0.1 * started).to(wide)
        self.max_exp_avg_sq = (self.exp_avg_sq * 1.5).to(wide) if self.amsgrad else None
        self.master: Tensor | None = None
        if self.master_kind == "fp32":
            self.master = exact
        elif self.master_kind == "remainder":
            self.param, self.master = split(exact)
        if not len(self.segments):
            self.segments = segments_of(self.numel)
        self.present = torch.ones(len(self.segments), dtype=torch.uint8)
        self.steps = torch.full((len(self.segments),), self.step, dtype=torch.int64)
        self.scales: list[Tensor] = []
        self.store_as(wide if wide is torch.float64 else self.state_dtype)

    def store_as(self, dtype: torch.dtype) -> None:
        """Rounds the moments to what they are stored in. In 8 bits they become any codes, with scales of their size."""
        generator = torch.Generator().manual_seed(self.seed)
        codes = torch.randint(0, 256, (self.numel,), generator=generator, dtype=torch.uint8)
        for name in stored.EXP_AVG, stored.EXP_AVG_SQ, stored.MAX_EXP_AVG_SQ:
            values = getattr(self, name)
            if values is None:
                continue
            if dtype is torch.uint8:
                scales = values[:: stored.BLOCK].clone(memory_format=torch.contiguous_format)
                self.scales.append(scales if name == stored.EXP_AVG else scales.abs())
                setattr(self, name, codes * bool(self.step))
            else:
                setattr(self, name, values.to(dtype))

    def wide_moments(self) -> dict[str, Tensor]:
        """The moments as they are computed with."""
        found = {}
        for place, name in enumerate((stored.EXP_AVG, stored.EXP_AVG_SQ, stored.MAX_EXP_AVG_SQ)):
            values = getattr(self, name)
            if values is not None and values.dtype is torch.uint8:
                found[name] = stored.decode(values, self.scales[place], signed=name == stored.EXP_AVG)
            elif values is not None:
                found[name] = values.to(moment_dtype(self.dtype))
        return found

    def exact(self) -> Tensor:
        """The parameters' exact values: masters where they are kept."""
        if self.master_kind == "remainder":
            assert self.master is not None
            return join(self.param, self.master)
        return self.param.to(moment_dtype(self.dtype)) if self.master is None else self.master

    def adam(self, options: Tensor, grad_scale: float | None = None) -> None:
        scale = None
        if grad_scale is not None:
            scale = torch.tensor(grad_scale, dtype=torch.float64).to(self.param.device)
        self.adam_together([self], options, scale)

    @staticmethod
    def adam_together(shards: Sequence[Shard], options: Tensor, grad_scale: Tensor | None) -> None:
        ops.update_("adam", [s.for_op() for s in shards], options, grad_scale)

    def for_op(self) -> ops.Shard:
        state = [t for t in (self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]
        tables = (self.segments, self.present, self.steps)
        return ops.Shard(self.param, self.master, self.grad, state, self.scales, *tables)

    def tensors(self) -> list[Tensor]:
        everything = [self.param, self.master, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq, self.steps]
        return [t for t in everything if t is not None] + self.scales


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 parameter (rounded half away) and remainder, in integers."""
    bits = master.view(torch.int32)
    param = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return param, (bits & 0xFFFF).to(torch.int16)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    high = param.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
