"""Under each framework a fit, a save and a resume on the device, in every stage: it goes on bit for bit.

Each framework has a process of its own, and is skipped by name where it is missing or too old.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bucket_manager.rig import same_bits
from zerox import FusedShardedAdam

STAGES = (1, 2, 3)
BATCHES = 4  # in each of two epochs
TIMEOUT_S = 100
Trained = list[Tensor]


class Missing(Exception):
    """The package that an integration needs, by name and version."""


def integration(name: str) -> Any:
    try:
        return importlib.import_module(f"zerox.integrations.{name}")
    except ImportError as error:
        if not str(error).startswith("zerox.integrations."):
            raise
        raise Missing(str(error)) from None


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def make_data() -> TensorDataset:
    x = torch.randn(4 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def values(model: nn.Module) -> Trained:
    return [param.detach().cpu().clone() for param in model.parameters()]


# ---- each trains two epochs, then one that it saves, and then the second from there


def with_lightning(stage: int, device: str, folder: Path) -> tuple[Trained, Trained]:
    """At the end of fit() Lightning moves the model to the CPU; it is saved after that."""
    integration("lightning")
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    def fit(epochs: int, resume: Path | None = None) -> tuple[Any, Module]:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            strategy=f"zerox_stage_{stage}",
            accelerator="gpu" if device == "cuda" else device,
            devices=1,
            max_epochs=epochs,
            gradient_clip_val=0.5,
            enable_checkpointing=False,
            default_root_dir=folder,
            **quiet,
        )
        module = Module()
        trainer.fit(module, DataLoader(make_data(), batch_size=4), ckpt_path=resume)
        assert {param.device.type for param in module.parameters()} == {"cpu"}
        return trainer, module

    trainer, _ = fit(1)
    trainer.save_checkpoint(folder / "half.ckpt")
    return values(fit(2)[1]), values(fit(2, folder / "half.ckpt")[1])


def with_fabric(stage: int, device: str, folder: Path) -> tuple[Trained, Trained]:
    integration("lightning")
    from lightning.fabric import Fabric

    def fit(epochs: range, save: bool = False) -> Trained:
        fabric = Fabric(accelerator="gpu" if device == "cuda" else device, devices=1, strategy=f"zerox_stage_{stage}")
        fabric.launch()
        plain = make_model()
        model, optimizer = fabric.setup(plain, adamw(plain.parameters()))
        loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=4))
        state = {"model": model, "optimizer": optimizer}
        if epochs.start:
            fabric.load(folder / "half.ckpt", state)
        for _ in epochs:
            for x, y in loader:
                fabric.backward((model(x) - y).square().mean())
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        if save:
            fabric.save(folder / "half.ckpt", state)
        return values(model)

    fit(range(1), save=True)
    return fit(range(2)), fit(range(1, 2))


class WithLoss(nn.Module):
    """As Trainer calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def with_trainer(stage: int, device: str, folder: Path) -> tuple[Trained, Trained]:
    ours = integration("transformers")
    from transformers import Trainer, TrainingArguments

    class ZeroxTrainer(ours.ZeroxTrainerMixin, Trainer):
        pass

    def fit(name: str, resume: Path | None = None) -> Trained:
        arguments = TrainingArguments(
            output_dir=str(folder / name),
            use_cpu=device == "cpu",
            report_to=[],
            per_device_train_batch_size=4,
            max_steps=2 * BATCHES,
            save_steps=BATCHES,
            disable_tqdm=True,
            learning_rate=0.01,
            lr_scheduler_type="constant",
        )
        rows = [{"x": x, "labels": y} for x, y in make_data()]
        trainer = ZeroxTrainer(model=WithLoss(), args=arguments, train_dataset=rows)
        trainer.zerox_options = {"stage": stage}
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return values(trainer.model)

    return fit("whole"), fit("again", folder / "whole" / f"checkpoint-{BATCHES}")


def with_accelerate(stage: int, device: str, folder: Path) -> tuple[Trained, Trained]:
    ours = integration("accelerate")
    from accelerate import Accelerator

    def fit(epochs: range, save: bool = False) -> Trained:
        accelerator = ours.adopt(Accelerator(cpu=device == "cpu"))
        plain = make_model()
        optimizer = FusedShardedAdam(plain.parameters(), lr=0.01, weight_decay=0.1, stage=stage)
        model, optimizer, loader = accelerator.prepare(plain, optimizer, DataLoader(make_data(), batch_size=4))
        if epochs.start:
            accelerator.load_state(str(folder))
        for _ in epochs:
            for x, y in loader:
                accelerator.backward((model(x) - y).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if save:
            accelerator.save_state(str(folder))
        return values(plain)

    fit(range(1), save=True)
    return fit(range(2)), fit(range(1, 2))


FRAMEWORKS: dict[str, Callable[[int, str, Path], tuple[Trained, Trained]]] = {
    "lightning": with_lightning,
    "fabric": with_fabric,
    "trainer": with_trainer,
    "accelerate": with_accelerate,
}


def trained(name: str, device: str, folder: Path) -> dict[int, tuple[Trained, Trained]] | str:
    """By stage; or what is missing."""
    for each in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(each).setLevel(logging.ERROR)
    found = {}
    for stage in STAGES:
        place = folder / str(stage)
        place.mkdir()
        try:
            found[stage] = FRAMEWORKS[name](stage, device, place)
        except Missing as missing:
            return str(missing)
    return found


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_fit_is_saved_and_goes_on_bit_for_bit(device: torch.device, name: str, tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        found = own.submit(trained, name, device.type, tmp_path).result(TIMEOUT_S)
    if isinstance(found, str):
        pytest.skip(found)
    first = found[STAGES[0]][0]
    for stage, (whole, resumed) in found.items():
        for one, other, begun in zip(whole, resumed, make_model().parameters(), strict=True):
            assert same_bits(one, other), stage
            assert not same_bits(one, begun), "nothing was trained"
        for one, other in zip(whole, first, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
