"""What an update is timed on: a shard of random values, kept as the optimizer keeps it, and its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bench.systems import HYPER
from zerox import ops
from zerox.memory.forms import remainder_of, split_param
from zerox.memory.mask import Mask
from zerox.memory.pages import zeros
from zerox.memory.stored import Stored
from zerox.plan.form import BFLOAT16, BLOCK_NUMEL, EIGHT_BIT, FLOAT32
from zerox.rules.adam import ADAM
from zerox.rules.lion import LION
from zerox.rules.rule import MASTER, REMAINDER, Rule, StateSpec
from zerox.rules.sgd import SGD

STATES = {"fp32": FLOAT32, "bf16": BFLOAT16, "8bit": EIGHT_BIT}


@dataclass(frozen=True)
class Kind:
    """What is trained: parameters, and the gradients that come with them, of ``dtype``, with or without a master.

    ``state``: what moments are stored in, a key of STATES.
    """

    name: str
    dtype: torch.dtype
    master: StateSpec | None = None
    state: str = "fp32"


@dataclass(frozen=True)
class Update:
    """A rule, and the options that it is timed with beside HYPER."""

    rule: Rule
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> dict[str, Any]:
        return {**self.rule.defaults, **HYPER, **self.options}

    def specs(self, kind: Kind) -> list[StateSpec]:
        """What is kept for each element."""
        return self.rule.wanted_states([self.group]) + ([kind.master] if kind.master else [])


# By the names of their ops.
UPDATES = {
    "adam": Update(ADAM),
    "sgd": Update(SGD),
    "sgd momentum": Update(SGD, {"momentum": 0.9}),
    "lion": Update(LION),
}


class Shard:
    """Random parameters, gradients and state, as an optimizer in full swing has them. States in 8 bits begin at 0."""

    def __init__(self, params: Sequence[int], kind: Kind, device: torch.device, op: str = "adam") -> None:
        self.rule, group = UPDATES[op].rule, UPDATES[op].group
        align = BLOCK_NUMEL if kind.state == "8bit" else 1
        self.segments = segments_of(params, device, align)
        numel = -(-int(self.segments[-1, 1]) // align) * align
        self.exact = torch.randn(numel, device=device)
        # They lie as the optimizer has them lie.
        self.param = zeros(numel, kind.dtype, device).copy_(self.exact)
        form = STATES[kind.state]
        specs = UPDATES[op].specs(kind)
        self.state = {spec.key: Stored.zeros(spec, self.rule.kept(spec, form), numel, device) for spec in specs}
        self.moments = [stored for stored in self.state.values() if stored.spec in self.rule.states]
        self.master = self.state[kind.master.key].values if kind.master else None
        if kind.master == MASTER:
            self.state[MASTER.key].values.copy_(self.exact)
        if kind.master == REMAINDER:
            self.param.copy_(split_param(self.exact))
            self.state[REMAINDER.key].values.copy_(remainder_of(self.param, self.exact))
        self.grad = torch.randn(numel, device=device).to(kind.dtype)
        for stored in self.moments if not form.scaled else ():
            if stored.spec.signed:
                stored.values.normal_(std=0.1)
            else:
                stored.values.uniform_(0, 0.1)
        self.present = torch.ones(len(params), dtype=torch.uint8, device=device)
        self.steps = torch.full((len(params),), 10, dtype=torch.int64, device=device)
        row = list(map(float, self.rule.row(group)))
        self.options = torch.tensor([row], dtype=torch.float64, device=device)

    @cached_property
    def mask(self) -> Tensor:
        """Keeps a fifth of the elements."""
        return Mask.of(torch.rand(self.param.numel(), device=self.param.device) < 0.2, ()).bits

    def update(self, masked: bool = False) -> None:
        state = [stored.values for stored in self.moments]
        scales = [stored.scales for stored in self.moments if stored.scales is not None]
        tables = (self.segments, self.present, self.steps)
        ours = ops.Shard(self.param, self.master, self.grad, state, scales, *tables, self.mask if masked else None)
        ops.update_(self.rule.name, [ours], self.options)


def segments_of(params: Sequence[int], device: torch.device, align: int = 1) -> Tensor:
    """One parameter behind the other, each at a multiple of ``align``."""
    numels = torch.tensor(params)
    room = -(-numels // align) * align
    starts = room.cumsum(0) - room
    zeros = torch.zeros_like(starts)
    return torch.stack([starts, starts + numels, zeros, torch.arange(len(params)), zeros], dim=1).to(device)
