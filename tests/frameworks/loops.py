"""One training loop of Accelerate's, in two kinds: adopted by zerox, and with DistributedDataParallel and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.hugging_face import accelerators_environment
from tests.optimizer.models import make_model
from zerox import FusedShardedAdam
from zerox.integrations.accelerate import adopt

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
SCALE = 2.0**10
MOST = 2e-7  # how far a float32 parameter may be from DistributedDataParallel's with AdamW, after all steps


class Normed(nn.Module):
    """Buffers that differ by rank unless they are shared, and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = make_model()
        self.norm = nn.BatchNorm1d(72)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += int(x.sum() > 0)
        return self.mixed(x) + torch.sigmoid(self.norm(x))


@dataclass(frozen=True)
class Case:
    stage: int = 2
    clip: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    sync_each_batch: bool = False
    precision: str = "no"
    overflow: int | None = None  # with a scaler: the step in which the last rank's loss is inf
    order: str = "together"  # what is prepared first
    batches: int = 7
    dtype: torch.dtype = torch.float32
    most: float = MOST
    buffers: bool = False
    of_zerox: dict[str, Any] = field(default_factory=dict)


class Seen(NamedTuple):
    norms: list[float]
    rates: list[float]
    skipped: list[bool]
    state: dict[str, Tensor]


def make_accelerator(case: Case, kind: str) -> Accelerator:
    plugin = GradientAccumulationPlugin(num_steps=case.accumulate, sync_each_batch=case.sync_each_batch)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=plugin, mixed_precision=case.precision, kwargs_handlers=[unused]
    )
    if case.overflow is not None:  # Accelerate makes none on CPUs
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return adopt(accelerator) if kind == "zerox" else accelerator


def make_optimizer(case: Case, kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "zerox":
        return FusedShardedAdam(model.parameters(), stage=case.stage, **case.of_zerox, **OPTIONS)
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def make_loader(world_size: int, batches: int, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(4 * batches * max(1, world_size), 72, generator=generator).to(dtype)
    return DataLoader(TensorDataset(inputs), batch_size=4)


def prepared(case: Case, accelerator: Accelerator, model: Any, optimizer: Any) -> tuple[Any, Any]:
    if case.order == "together":
        return accelerator.prepare(model, optimizer)
    if case.order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        return accelerator.prepare(model), optimizer
    model = accelerator.prepare(model)
    return model, accelerator.prepare(optimizer)


def train(rank: int, world_size: int, kind: str, case: Case) -> Seen:
    with accelerators_environment(rank, world_size):
        accelerator = make_accelerator(case, kind)
        torch.manual_seed(0)
        plain = (
            Normed() if case.buffers else make_model(case.dtype, seed=rank)
        )  # ranks begin with rank 0's values in any case
        if isinstance(plain, Normed):
            plain.seen += rank
        optimizer = make_optimizer(case, kind, plain)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer = prepared(case, accelerator, plain, optimizer)
        assert not isinstance(plain, Normed) or not plain.seen.any(), "ranks begin with rank 0's buffers"
        loader, schedule = accelerator.prepare(make_loader(world_size, case.batches, case.dtype), schedule)
        seen = Seen([], [], [], {})
        for step, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(x).to(torch.promote_types(case.dtype, torch.float32)).square().mean()
                bad = step == case.overflow and rank == max(0, world_size - 1)
                accelerator.backward(loss * math.inf if bad else loss)
                if accelerator.sync_gradients:
                    clip(accelerator, case, kind, model, optimizer, seen)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen.rates.append(optimizer.param_groups[0]["lr"])
                seen.skipped.append(accelerator.optimizer_step_was_skipped)
        unwrapped = accelerator.unwrap_model(model)
        assert unwrapped is plain
        seen.state.update({name: value.detach().clone() for name, value in plain.state_dict().items()})
        return seen


def clip(accelerator: Accelerator, case: Case, kind: str, model: nn.Module, optimizer: Any, seen: Seen) -> None:
    if kind != "zerox" and accelerator.scaler is not None:  # Accelerate itself does so only on accelerators
        accelerator.scaler.unscale_(optimizer.optimizer)
    if case.clip is not None:
        seen.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip)))
    if case.clip_value is not None:
        accelerator.clip_grad_value_(model.parameters(), case.clip_value)
