"""Shards for kernel tests: tensors as the optimizer makes them, without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels import stored
from zerox import ops
from zerox.rules.adam import ADAM
from zerox.rules.known import KNOWN
from zerox.rules.rule import Rule, StateSpec

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RULES = tuple(rule for rule in KNOWN.values() if not rule.has_owners)  # those with kernels
# The options that tests update with unless they say otherwise: every term has a weight.
USUAL: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "weight_decay": 0.1},
}


def group_of(rule: Rule = ADAM, **config: Any) -> dict[str, Any]:
    return {**rule.defaults, **USUAL[rule.name], **config}


def options_table(rule: Rule = ADAM, **config: Any) -> Tensor:
    """One row."""
    group = group_of(rule, **config)
    rule.check(group)
    return torch.tensor([list(map(float, rule.row(group)))], dtype=torch.float64)


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
    """One shard with random contents. ``step`` updates were made before.

    ``config``: what its param groups say beside what is usual, which decides on the states that are kept. They are
    attributes by their keys.
    """

    numel: int
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    master_kind: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    seed: int = 0
    grad_size: float = 1.0
    segments: Tensor = field(default_factory=lambda: torch.empty(0, 5))
    state_dtype: torch.dtype = torch.float32  # torch.uint8: 8-bit codes; of fp64 parameters always float64
    rule: Rule = ADAM

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(scale: float = 1.0) -> Tensor:
            return torch.randn(self.numel, generator=generator, dtype=torch.float64) * scale

        wide = moment_dtype(self.dtype)
        exact = random().to(wide)
        self.param = exact.to(self.dtype)
        self.grad = random(self.grad_size).to(self.grad_dtype or self.dtype)
        for spec in self.kept:
            if spec.signed:
                values = random(0.1 * self.grad_size)
            elif spec.when:  # the largest of the state before it
                values = getattr(self, self.kept[-2].key).double() * 1.5
            else:
                values = random(self.grad_size).square() * 0.1
            setattr(self, spec.key, (values * (self.step > 0)).to(wide))
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

    @property
    def kept(self) -> list[StateSpec]:
        return self.rule.wanted_states([group_of(self.rule, **self.config)])

    @property
    def states(self) -> dict[str, Tensor]:
        return {spec.key: getattr(self, spec.key) for spec in self.kept}

    def store_as(self, dtype: torch.dtype) -> None:
        """Rounds the states to what they are stored in. In 8 bits they become any codes, with scales of their size."""
        generator = torch.Generator().manual_seed(self.seed)
        codes = torch.randint(0, 256, (self.numel,), generator=generator, dtype=torch.uint8)
        for spec in self.kept:
            values = getattr(self, spec.key)
            if dtype is torch.uint8:
                scales = values[:: stored.BLOCK].clone(memory_format=torch.contiguous_format)
                self.scales.append(scales if spec.signed else scales.abs())
                setattr(self, spec.key, codes * bool(self.step))
            else:
                setattr(self, spec.key, values.to(dtype))

    def wide_states(self) -> dict[str, Tensor]:
        """The states as they are computed with."""
        found = {}
        for place, spec in enumerate(self.kept):
            values = getattr(self, spec.key)
            if values.dtype is torch.uint8:
                found[spec.key] = stored.decode(values, self.scales[place], spec.signed)
            else:
                found[spec.key] = values.to(moment_dtype(self.dtype))
        return found

    def exact(self) -> Tensor:
        """The parameters' exact values: masters where they are kept."""
        if self.master_kind == "remainder":
            assert self.master is not None
            return join(self.param, self.master)
        return self.param.to(moment_dtype(self.dtype)) if self.master is None else self.master

    def update(self, options: Tensor | None = None, grad_scale: float | None = None) -> None:
        """One step. Without ``options``, with those of its own ``config``."""
        device = self.param.device
        scale = None if grad_scale is None else torch.tensor(grad_scale, dtype=torch.float64).to(device)
        own = options_table(self.rule, **self.config).to(device) if options is None else options
        self.update_together([self], own, scale)

    @staticmethod
    def update_together(shards: Sequence[Shard], options: Tensor, grad_scale: Tensor | None) -> None:
        ops.update_(shards[0].rule.name, [s.for_op() for s in shards], options, grad_scale)

    def for_op(self) -> ops.Shard:
        tables = (self.segments, self.present, self.steps)
        return ops.Shard(self.param, self.master, self.grad, list(self.states.values()), self.scales, *tables)

    def tensors(self) -> list[Tensor]:
        master = [] if self.master is None else [self.master]
        return [self.param, *master, *self.states.values(), self.steps, *self.scales]


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
