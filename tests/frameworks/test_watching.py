"""Callbacks that log figures, and torchmetrics, TensorBoard and torch.profiler beside zerox, with the real packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from tests.frameworks.lightning_rig import Module, Ranks, data, difference, run, trainer, values
from zerox.integrations.lightning_watch import WatchCallback

NAMES = {"grad_norm", "skipped_steps", "step_ms", "exposed_ms", "resident_bytes", "peak_bytes"}
STAGES = (1, 2, 3)
BATCHES = 12


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


class Measured(Module):
    """torchmetrics adds up over batches and over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.error(self(batch[0]).detach(), batch[1])
        self.mean(loss.detach(), weight=1 + self.global_rank)
        self.log("error", self.error, on_epoch=True, on_step=False)
        self.log("mean", self.mean, on_epoch=True, on_step=True)
        return loss


def logged(rank: int, world_size: int, strategy: str, folder: Path, clip: float | None) -> tuple[list[Tensor], Any]:
    module = Measured()
    ours = "zerox" in strategy
    options: dict[str, Any] = {"logger": TensorBoardLogger(folder / strategy, name="", version="run")}
    options |= {"callbacks": [WatchCallback()] if ours else [], "log_every_n_steps": 3, "gradient_clip_val": clip}
    fitted = trainer(rank, world_size, strategy, **options)
    fitted.fit(module, data())
    return values(module), {name: float(value) for name, value in fitted.callback_metrics.items()}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_are_ddp_s_and_tensorboard_has_the_figures_of_each_step(
    world_size: int, clip: float | None, tmp_path: Path
) -> None:
    ddp = run(logged, world_size, "ddp", tmp_path, clip)
    norms: dict[int, list[float]] = {}
    for stage in STAGES:
        name = f"zerox_stage_{stage}"
        ours = run(logged, world_size, name, tmp_path, clip)
        for (params, metrics), (others, others_metrics) in zip(ours, ddp, strict=True):
            assert difference(params, others) <= 2e-7
            assert metrics == pytest.approx(others_metrics, rel=1e-5)
        found = curves(tmp_path / name / "run")
        steps = list(range(3, BATCHES // world_size + 1, 3))
        for figure in NAMES:
            assert [step for step, _ in found[f"zerox/{figure}"]] == steps, figure
        norms[stage] = [value for _, value in found["zerox/grad_norm"]]
        assert all(value > 0 for value in norms[stage])
        assert norms[stage] == norms[1]


def fabric_logged(rank: int, world_size: int, folder: Path) -> None:
    from lightning.fabric.loggers import TensorBoardLogger as FabricLogger

    logger = FabricLogger(folder, name="", version="run")
    plugins = [Ranks(rank, world_size)]
    callbacks = [WatchCallback(every=2)]
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy="zerox", plugins=plugins, loggers=logger, callbacks=callbacks
    )
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for _ in range(6):
        fabric.backward(model(torch.randn(2, 4)).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    logger.finalize("success")


@pytest.mark.parametrize("world_size", [1, 2])
def test_fabric_s_loggers_get_the_figures(world_size: int, tmp_path: Path) -> None:
    run(fabric_logged, world_size, tmp_path)
    found = curves(tmp_path / "run")
    assert {name.removeprefix("zerox/") for name in found} == NAMES
    assert [step for step, _ in found["zerox/exposed_ms"]] == [2, 4, 6]


def under_transformers(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    from transformers import Trainer, TrainingArguments

    from zerox import FusedShardedAdam
    from zerox.integrations.transformers_watch import WatchCallback

    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.line(x).square().mean()}

    writer = SummaryWriter(folder)
    args = TrainingArguments(
        str(folder / "out"), max_steps=6, logging_steps=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, per_device_train_batch_size=2, remove_unused_columns=False,
    )  # fmt: skip
    trained = Trainer(
        Model(),
        args,
        train_dataset=[{"x": torch.ones(4) * index} for index in range(24)],
        optimizer_cls_and_kwargs=(FusedShardedAdam, {"lr": 1e-2, "stage": 1}),
        callbacks=[WatchCallback(writer.add_scalar)],
    )
    trained.train()
    writer.close()
    return trained.state.log_history


def test_trainer_s_log_and_a_writer_have_the_figures(tmp_path: Path) -> None:
    [history] = run(under_transformers, 1, tmp_path)
    logs = [each for each in history if "loss" in each]
    assert len(logs) == 3
    for log in logs:
        figures = {name.removeprefix("zerox/") for name in log if name.startswith("zerox/")}
        assert figures == NAMES - {"grad_norm"}, "Trainer has clipped with torch's own function"
    assert [step for step, _ in curves(tmp_path)["zerox/step_ms"]] == list(range(1, 7))


def profiled(rank: int, world_size: int, folder: Path) -> list[str]:
    module = Module()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}"),
    ) as seen:
        trainer(rank, world_size, "zerox", limit_train_batches=3, logger=False).fit(module, data())
    return [event.key for event in seen.key_averages()]


def test_the_profiler_sees_a_step_under_lightning(tmp_path: Path) -> None:
    for names in run(profiled, 2, tmp_path):
        assert {"zerox::settle", "zerox::update bucket 0", "zerox::launch bucket 0"} <= set(names)
        assert "Optimizer.step#FusedShardedAdam.step" in names
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 2


def test_the_example_writes_curves(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    example = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    small = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--device=cpu", "--steps=20"]
    command = [
        sys.executable,
        str(example),
        "--data",
        str(text),
        *small,
        "--quiet",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = curves(tmp_path / "logs")
    assert {name.removeprefix("zerox/") for name in found} == NAMES | {"loss"}
    assert [step for step, _ in found["zerox/grad_norm"]] == list(range(1, 21))
    assert [step for step, _ in found["loss"]] == [10, 20]
