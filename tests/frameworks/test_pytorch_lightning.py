"""The packages pytorch_lightning and lightning_fabric, which have the classes of lightning under names of their own."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import ClusterEnvironment
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

import zerox.integrations.lightning  # beside it: names of one are not the other's
from tests.frameworks.lightning_rig import MadeRanks, data, difference, run, values
from zerox import FusedShardedAdam
from zerox.integrations.pytorch_lightning import ZeroxFabricStrategy, ZeroxStrategy
from zerox.integrations.pytorch_lightning_watch import WatchCallback

STAGES = (1, 2, 3)
TOLERANCE = 2e-7

for name in ("pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Ranks(MadeRanks, ClusterEnvironment):
    pass


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(rank: int, world_size: int, strategy: Any, folder: Path, num_epochs: int, ckpt: str | None) -> list[Tensor]:
    module, ours = Module(), strategy != "ddp"
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = pl.Trainer(
        strategy=ZeroxStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        plugins=[Ranks(rank, world_size)],
        accelerator="cpu",
        devices=world_size,
        max_epochs=num_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        callbacks=[keep, *([WatchCallback(every=1)] if ours else [])],
        logger=CSVLogger(folder, name="", version="run"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path=ckpt)
    assert type(trainer.optimizers[0]) is (FusedShardedAdam if ours else torch.optim.AdamW)
    return values(module)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_trains_as_with_ddp_and_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    ddp = run(fit, world_size, "ddp", tmp_path / "ddp", 2, None)
    for stage in STAGES:
        folder = tmp_path / f"{stage}"
        ours = run(fit, world_size, {"stage": stage}, folder, 2, None)
        ckpt = str(folder / "epoch=0.ckpt")
        again = run(fit, world_size, f"zerox_stage_{stage}", tmp_path / f"{stage} again", 2, ckpt)
        for own, other, later in zip(ours, ddp, again, strict=True):
            assert difference(own, other) <= TOLERANCE, stage
            assert all(torch.equal(a, b) for a, b in zip(own, later, strict=True)), stage
        assert "zerox/grad_norm" in (folder / "run" / "metrics.csv").read_text().splitlines()[0]


def fabric_steps(rank: int, world_size: int, strategy: Any) -> list[Tensor]:
    if isinstance(strategy, int):
        strategy = ZeroxFabricStrategy(stage=strategy)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=[Ranks(rank, world_size)])
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(rank)
    for step in range(6):
        with fabric.no_backward_sync(wrapped, enabled=step % 2 == 0):
            fabric.backward(wrapped(torch.randn(3, 4)).square().mean())
        if step % 2:
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_fabric_trains_as_with_ddp(world_size: int) -> None:
    ddp = run(fabric_steps, world_size, "ddp")
    for strategy in ("zerox", *STAGES):
        for own, other in zip(run(fabric_steps, world_size, strategy), ddp, strict=True):
            assert difference(own, other) <= TOLERANCE, strategy


def test_each_package_takes_its_own_strategy_only() -> None:
    assert not issubclass(ZeroxStrategy, zerox.integrations.lightning.DDPStrategy)
    with pytest.raises(ValueError, match=r"instance of `pytorch_lightning\.strategies\.Strategy`"):
        pl.Trainer(strategy=zerox.integrations.lightning.ZeroxStrategy())


@pytest.mark.parametrize(("missing", "there"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")])
def test_where_one_of_them_is_missing_the_line_names_the_other(missing: str, there: str) -> None:
    code = f"""
from importlib import import_module, metadata
real = metadata.version
def version(name):
    if name == "{missing}":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
for module in ("{missing}", "{missing}_watch"):
    try:
        import_module(f"zerox.integrations.{{module}}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    line = (
        f"zerox.integrations.{missing} needs {missing} 2.6 or newer, and it is not installed: pip install "
        f"'{missing}>=2.6', or import zerox.integrations.{there} for the {there} that is installed\n"
    )
    assert done.stdout == 2 * line, done.stderr
