"""What each parameter's mean gradient must be, from the program alone: no zerox, no ranks, a tensor at a time.

The contract's words: local gradients add up as autograd adds them; the mean is summed in fp32 (fp64 for fp64) in rank
order, divided once by W, and rounded once to the wire's dtype; a gradient that is absent on some ranks is zero there,
one that is absent on all leaves its parameter alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.properties.programs import DTYPES, Program


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class Ledger:
    """One parameter's gradient on all ranks. ``reduced`` is what the owner holds, in the wire's dtype."""

    def __init__(self, program: Program, index: int) -> None:
        self.world_size = program.world_size
        self.dtype = DTYPES[program.params[index].dtype]
        self.wire = program.options["reduce_dtype"] or self.dtype
        self.sharded = program.options["stage"] >= 2
        self.local: list[Tensor | None] = [None] * self.world_size  # p.grad as autograd leaves it
        self.reduced: Tensor | None = None
        self.unsent = False

    def add(self, rank: int, grad: Tensor) -> None:
        before = self.local[rank]
        self.local[rank] = grad if before is None else before + grad
        self.unsent = True

    def send(self) -> None:
        """All ranks' local gradients become their mean: where gradients are sharded it is added to what was there."""
        self.unsent = False
        there = [grad for grad in self.local if grad is not None]
        if not there:
            return
        if self.world_size == 1 and not self.sharded:
            self.reduced = there[0].to(self.wire)
            return
        total = torch.zeros_like(there[0], dtype=wide(self.wire))
        for grad in self.local:
            if grad is not None:
                total = total + grad.to(self.wire).to(total.dtype)
        mean = total / self.world_size
        if self.sharded:
            if self.reduced is not None:
                mean = mean + self.reduced.to(total.dtype)
            self.local = [None] * self.world_size
        self.reduced = mean.to(self.wire)
        if not self.sharded:
            self.local = [self.reduced.to(self.dtype)] * self.world_size

    def zero(self, set_to_none: bool) -> None:
        if set_to_none:
            self.local = [None] * self.world_size
            self.reduced = None
        else:
            self.local = [None if grad is None else torch.zeros_like(grad) for grad in self.local]
            self.reduced = None if self.reduced is None else torch.zeros_like(self.reduced)


def mean_gradients(program: Program) -> list[list[Tensor | None]]:
    """For each step and parameter: the mean gradient that it is updated with, in memory order, or None."""
    ledgers = [Ledger(program, index) for index in range(len(program.params))]
    watched = {index for index, param in enumerate(program.params) if param.trained_from == 0}  # they have a bucket
    means = []
    for number, step in enumerate(program.steps):
        for micro, syncs in enumerate(step.micros):
            ran = False
            for rank in range(program.world_size):
                grads = program.gradients(rank, number, micro)
                for index, ledger in enumerate(ledgers):
                    if program.has_gradient(rank, number, micro, index):
                        ledger.add(rank, grads[index])
                        ran = True
            if ran and syncs:
                for index in watched:
                    ledgers[index].send()
        # An unfrozen parameter gets its bucket in step(), which also sends what no backward has sent.
        watched |= {index for index in range(len(ledgers)) if program.is_trained(index, number)}
        for index in watched:
            if ledgers[index].unsent:
                ledgers[index].send()
        means.append([ledger.reduced for ledger in ledgers])
        if step.zero is not None:
            for ledger in ledgers:
                ledger.zero(step.zero)
    return means
