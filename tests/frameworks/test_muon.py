"""Accelerate, Trainer and Lightning train muon_groups() as they train torch's Muon and AdamW under DDP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

from tests.frameworks.lightning_rig import Module as LightningModule
from tests.frameworks.lightning_rig import data, run, trainer
from tests.frameworks.trainers import arguments, make_data, make_model
from tests.hugging_face import ALONE, accelerators_environment, run_anywhere
from tests.kernels.shards import same_bits
from zerox import FusedShardedMuon, muon_groups
from zerox.integrations.accelerate import adopt
from zerox.integrations.transformers import adopt as adopt_trainer

RATES: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "verbose": False}
ADAMW_LR = 1e-3
MOST_STEPS = 8


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's two as one, for frameworks that take one optimizer."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        by_rule = {group["rule"]: group for group in groups}
        for group in groups:
            del group["rule"]
        self.both = torch.optim.Muon([by_rule["muon"]]), torch.optim.AdamW([by_rule["adam"]])
        super().__init__([group for each in self.both for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, each in zip(self.param_groups, self.both, strict=True):
            each.param_groups[0]["lr"] = group["lr"]  # Accelerate makes copies of the groups
            each.step()
        return loss


def optimizer_for(model: nn.Module, kind: str, adamw_lr: float) -> torch.optim.Optimizer:
    groups = muon_groups(model, adamw_lr=adamw_lr, **RATES)
    return FusedShardedMuon(groups) if kind == "zerox" else MuonAndAdamW(groups)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def in_accelerate(rank: int, world_size: int, kind: str, adamw_lr: float) -> dict[str, Tensor]:
    with accelerators_environment(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if kind == "zerox":
            adopt(accelerator)
        torch.manual_seed(rank)
        plain = make_net()
        optimizer = optimizer_for(plain, kind, adamw_lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.manual_seed(1)
        inputs = TensorDataset(torch.randn(32, 6))
        model, optimizer, loader, schedule = accelerator.prepare(
            plain, optimizer, DataLoader(inputs, batch_size=2), schedule
        )
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return values(plain)


def in_trainer(rank: int, world_size: int, kind: str, adamw_lr: float, folder: Path) -> dict[str, Tensor]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with accelerators_environment(rank, world_size):
        args = arguments(folder / kind, max_grad_norm=0.0, gradient_accumulation_steps=2)  # it makes the process group
        model = make_model(seed=rank)
        found = Trainer(
            model=model,
            args=args,
            train_dataset=make_data(24),
            optimizers=(optimizer_for(model, kind, adamw_lr), None),
        )
        if kind == "zerox":
            adopt_trainer(found)
        found.train()
        return values(model)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class Module(LightningModule):
    def __init__(self, kind: str, adamw_lr: float) -> None:
        super().__init__()
        self.net = make_net()
        self.kind, self.adamw_lr = kind, adamw_lr

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_for(self, self.kind, self.adamw_lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def in_lightning(rank: int, world_size: int, kind: str, adamw_lr: float) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    module = Module(kind, adamw_lr)
    strategy = "zerox" if kind == "zerox" else "ddp"
    trainer(rank, world_size, strategy, accumulate_grad_batches=2).fit(module, data())
    return values(module)


def check(function: Callable[..., Any], run_on: Callable[..., Any], model: nn.Module, *args: Any) -> None:
    """All bits while AdamW's learning rate is 0. Its own updates differ in their last bits from torch's, and through
    the gradients Newton-Schulz, in bfloat16, makes more of that."""
    groups = muon_groups(model, lr=0.0, adamw_lr=0.0, verbose=False)
    of_muon = {name for group in groups if group["rule"] == "muon" for name, _ in group["params"]}
    of_weights = {name for name, param in model.named_parameters() if param.dim() == 2} - of_muon
    assert of_muon
    assert of_weights
    still, moved = (
        {kind: run_on(function, kind, adamw_lr, *args) for kind in ("zerox", "torch")} for adamw_lr in (0.0, ADAMW_LR)
    )
    for ours, theirs in zip(still["zerox"], still["torch"], strict=True):
        assert not [name for name, value in ours.items() if not same_bits(value, theirs[name])]
    for ours, theirs in zip(moved["zerox"], moved["torch"], strict=True):
        for name, value in ours.items():
            most = MOST_STEPS * (RATES["lr"] if name in of_muon else ADAMW_LR) * 2**-8
            assert (value - theirs[name]).abs().max() <= most, name
    for name in of_weights:
        assert not same_bits(moved["zerox"][0][name], still["zerox"][0][name]), "AdamW updates"


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_accelerate_trains_by_muon(world_size: int) -> None:
    check(in_accelerate, lambda function, *args: run_anywhere(function, world_size, *args), make_net())


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_trainer_trains_by_muon(world_size: int, tmp_path: Path) -> None:
    """With an optimizer that was passed."""
    check(in_trainer, lambda function, *args: run_anywhere(function, world_size, *args), make_model(), tmp_path)


@pytest.mark.parametrize("world_size", [0, 2])
def test_lightning_trains_by_muon(world_size: int) -> None:
    """With an optimizer that configure_optimizers() made."""
    check(in_lightning, lambda function, *args: run(function, world_size, *args), Module("zerox", 0.0))
