"""Used beside an optimizer: torchmetrics, TensorBoard, torch.profiler, and containers as torchtitan has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler
from torch.utils.tensorboard import SummaryWriter

from tests.hugging_face import ALONE, run_anywhere
from tests.optimizer.models import batch, make_model
from zerox import FusedShardedAdam

STEPS = 3


def steps(model: nn.Module, optimizer: FusedShardedAdam, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each step the model's outputs and the gradient's norm, before step()."""
    for number in range(STEPS):
        outputs = model(batch(rank, number))
        outputs.square().mean().backward()
        yield outputs.detach(), optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def with_metrics(rank: int, world_size: int) -> tuple[float, list[float], list[torch.Tensor]]:
    """The metric is computed in the middle of steps too, where its collectives meet gradients on their way."""
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-3)
    metric, squares, within = torchmetrics.MeanSquaredError(), [], []
    for outputs, _ in steps(model, optimizer, rank):
        metric.update(outputs, torch.zeros_like(outputs))
        squares.append(float(outputs.square().mean()))
        within.append(float(metric.compute()))
    params = [param.detach().clone() for param in model.parameters()]
    return float(metric.compute()), squares, params


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_torchmetrics_are_computed_beside_gradients_on_their_way(world_size: int) -> None:
    found = run_anywhere(with_metrics, world_size)
    wanted = [square for _, squares, _ in found for square in squares]
    for value, _, params in found:
        assert value == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
        assert all(map(torch.equal, params, found[0][2]))


def with_tensorboard(rank: int, world_size: int, folder: Path) -> list[float]:
    model = make_model()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-3, stage=1)
    norms = []
    with SummaryWriter(str(folder / str(rank))) as writer:
        for number, (_, norm) in enumerate(steps(model, optimizer, rank)):
            norms.append(float(norm))
            writer.add_scalar("norm", norm, number)
            for name, param in model.named_parameters():
                writer.add_histogram(name, param, number)
                if param.grad is not None:  # whole in stage 1
                    writer.add_histogram(f"gradient of {name}", param.grad, number)
        other = FusedShardedAdam(sharded := [nn.Parameter(torch.ones(8))], stage=2)
        (sharded[0].sum() * 2).backward()
        if world_size > 1:
            with pytest.raises(RuntimeError, match=r"its placeholder .* needs values.*stage=1"):
                writer.add_histogram("gradient", sharded[0].grad, 0)
        other.step()
    return norms


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_tensorboard_shows_norms_parameters_and_gradients(world_size: int, tmp_path: Path) -> None:
    for rank, norms in enumerate(run_anywhere(with_tensorboard, world_size, tmp_path)):
        events = EventAccumulator(str(tmp_path / str(rank)))
        events.Reload()
        assert [event.value for event in events.Scalars("norm")] == pytest.approx(norms)
        histograms = events.Tags()["histograms"]
        assert {"gain", "gradient of gain"} <= set(histograms)
        [first, *_] = events.Histograms("gradient of inner.weight")
        assert first.histogram_value.num == 72 * 130


def with_profiler(rank: int, world_size: int, folder: Path) -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-3)
    handler = tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}")
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler) as profiler:
        for _ in steps(model, optimizer, rank):
            profiler.step()


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_a_trace_shows_what_zerox_does(world_size: int, tmp_path: Path) -> None:
    run_anywhere(with_profiler, world_size, tmp_path)
    for rank in range(max(1, world_size)):
        [file] = tmp_path.glob(f"rank{rank}.*.json")
        names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
        assert "Optimizer.step#FusedShardedAdam.step" in names
        assert any(name.startswith("zerox::update") for name in names), sorted(n for n in names if "zerox" in n)


# ---- a loop as torchtitan's: containers that torch.distributed.checkpoint saves


class Models(Stateful):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class Optimizers(torch.optim.Optimizer, Stateful):
    """A container of optimizers that is one for schedulers."""

    FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, models: list[nn.Module], **options: Any) -> None:
        self.models = models
        self.optimizers = [FusedShardedAdam(model.parameters(), **options) for model in models]
        every = [param for model in models for param in model.parameters()]
        torch.optim.Optimizer.__init__(self, every, options)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(model, optimizer, options=self.FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict, options=self.FLAT)


def titan(rank: int, world_size: int, folder: Path, resume: bool) -> dict[str, torch.Tensor]:
    model = make_model(seed=int(resume))
    optimizers = Optimizers([model], lr=1e-3)
    optimizers.register_step_post_hook(lambda *_: None)
    states = {"model": Models(model), "optimizer": optimizers}
    if resume:
        dcp.load(states, checkpoint_id=str(folder))
    for number in range(2 if resume else 0, 4):
        if number == 2 and not resume:
            dcp.save(states, checkpoint_id=str(folder))
        model(batch(rank, number)).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
    if dist.is_initialized():
        dist.barrier()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchtitan_s_containers_go_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    first = run_anywhere(titan, world_size, tmp_path, False)
    second = run_anywhere(titan, world_size, tmp_path, True)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
