"""The same training under torch's DistributedDataParallel and under ours, with an optimizer of torch or of zerox."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

import zerox

TORCH = "torch"  # torch's class and torch.optim
LEFT_OVER = "left over"  # ours and torch.optim: no optimizer of zerox holds a parameter
STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3}
KINDS = (TORCH, LEFT_OVER, *STAGES)
WHOLE_GRADS = (TORCH, LEFT_OVER, "stage 1")  # p.grad has values

LR = 1e-2


def data(rank: int, seed: int = 0, shape: tuple[int, ...] = (4, 4)) -> Tensor:
    """A rank's batch: other values on each rank and for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


@dataclass
class Run:
    """One kind of training on one rank, and what was seen in it."""

    kind: str
    rank: int
    grads: list[Tensor | None] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.kind != TORCH

    def wrap(self, model: nn.Module, **options: Any) -> OfTorch:
        return (zerox.DistributedDataParallel if self.is_ours else OfTorch)(model, **options)

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        if self.kind in STAGES:
            return zerox.FusedShardedAdam(params, lr=LR, stage=STAGES[self.kind], bucket_cap_mb=1e-4)
        return torch.optim.AdamW(params, lr=LR)

    def look(self, model: nn.Module) -> None:
        """At gradients, right after a backward: are they there, and their values where they are whole."""
        grads = [param.grad for param in model.parameters() if param.requires_grad]
        self.present += [grad is not None for grad in grads]
        if self.kind in WHOLE_GRADS:
            self.grads += [None if grad is None else grad.detach().clone() for grad in grads]

    def keep(self, model: nn.Module, optimizer: Any) -> None:
        with optimizer.whole() if self.kind in STAGES else nullcontext():
            self.params += [param.detach().clone() for param in model.parameters()]

    def train(self, model: nn.Module, losses: Iterable[Callable[[Any], Tensor]], **options: Any) -> None:
        """One step for each loss, which is a function of the wrapped model."""
        wrapped = self.wrap(model, **options)
        optimizer = self.optimizer([param for param in wrapped.parameters() if param.requires_grad])
        for loss in losses:
            loss(wrapped).backward()
            self.look(wrapped)
            optimizer.step()
            optimizer.zero_grad()
        self.keep(wrapped, optimizer)


Case = Callable[[Run], None]


def apart(ours: Run, theirs: Run) -> str:
    """Empty if the same was seen: gradients, where both have them, and parameters within 1e-6."""
    if ours.present != theirs.present:
        return f"p.grad is there: {ours.present}, torch's: {theirs.present}"
    grads = theirs.grads if ours.kind in WHOLE_GRADS else []
    found = max([0.0, *_distances(ours.grads, grads), *_distances(ours.params, theirs.params)])
    return "" if found <= 1e-6 else f"{found} apart"


def _distances(ours: list[Any], theirs: list[Any]) -> Iterator[float]:
    for one, other in zip(ours, theirs, strict=True):
        if (one is None) != (other is None):
            yield float("inf")
        elif one is not None and one.numel():
            assert one.stride() == other.stride(), f"strides {one.stride()}, torch's {other.stride()}"
            scale = max(1.0, float(other.double().abs().max()))
            yield float((one.double() - other.double()).abs().max()) / scale


def compared(rank: int, case: Case, kinds: Iterable[str] = KINDS[1:]) -> dict[str, str]:
    """By kind of training with ours: how it is apart from torch's, or what it raised."""
    found = {}
    theirs = Run(TORCH, rank)
    torch.manual_seed(0)
    case(theirs)
    for kind in kinds:
        ours = Run(kind, rank)
        torch.manual_seed(0)
        try:
            case(ours)
            difference = apart(ours, theirs)
        except Exception:
            difference = traceback.format_exc()
        if difference:
            found[kind] = difference
    return found
