"""A LightningModule trains with ``strategy="zerox"`` as with ``strategy="ddp"``, in every stage and on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.frameworks.lightning_rig import Module, as_on_rank_0, data, difference, run, trainer, values

WORLDS = (0, 1, 2)
STAGES = (1, 2, 3)
TOLERANCE = 2e-7


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        then = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=12)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}


class Grouped(Module):
    def configure_optimizers(self) -> Any:
        first, *others = self.net
        groups = [{"params": first.parameters(), "lr": 0.05}, {"params": torch.nn.ModuleList(others).parameters()}]
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)


class Other(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.01)


class Frozen(Module):
    """Ranks differ in what no optimizer trains: they take rank 0's."""

    def setup(self, stage: str) -> None:
        self.net[0].requires_grad_(False)
        with torch.no_grad():
            self.net[0].weight.mul_(1 + self.global_rank)
            self.net[2].weight.mul_(1 + self.global_rank)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Manual(Module):
    """Two optimizers that take turns, as in a GAN, with accumulation by hand and closures."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        one = torch.optim.AdamW(self.net[:2].parameters(), lr=0.01)
        other = torch.optim.AdamW(self.net[2:].parameters(), lr=0.02)
        return [one, other], [torch.optim.lr_scheduler.ExponentialLR(one, 0.9)]

    def training_step(self, batch: Any, index: int) -> None:
        one, other = self.optimizers()
        with one.toggle_model(sync_grad=index % 2 == 1):
            self.manual_backward(self.loss(batch))
            if index % 2:
                self.clip_gradients(one, gradient_clip_val=0.1)
                one.step()
                one.zero_grad()
                self.lr_schedulers().step()

        def closure() -> Tensor:
            other.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.toggle_optimizer(other)
        other.step(closure)
        self.untoggle_optimizer(other)
        self.losses.append(float(self.loss(batch).detach()))


def half() -> dict[str, Any]:
    """Scales so large that the first steps overflow."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))]}


CASES: dict[str, tuple[Callable[[], Module], dict[str, Any], dict[str, Any]]] = {
    "as it is": (Module, {}, {}),
    "clip": (Module, {"gradient_clip_val": 0.05}, {}),
    "clip by value": (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "accumulate and clip, the last step of fewer batches": (
        Module,
        {"accumulate_grad_batches": 5, "gradient_clip_val": 0.05},
        {},
    ),
    "bf16-mixed": (Module, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, {}),
    "16-mixed and clip": (Module, {"half": True, "gradient_clip_val": 0.05}, {}),
    "64-true": (Module, {"precision": "64-true"}, {}),
    "schedulers": (Scheduled, {}, {}),
    "SGD with param groups": (Grouped, {}, {}),
    "a class that ShardedOptimizer trains": (Other, {}, {}),
    "frozen": (Frozen, {}, {}),
    "manual optimization": (Manual, {}, {}),
    "buffers": (lambda: Module(norm=True), {"accumulate_grad_batches": 2}, {"rows": 128, "batch": 16}),
}


def fit(rank: int, world_size: int, case: str, strategy: str) -> tuple[list[Tensor], list[float], bool]:
    make, options, of_data = CASES[case]
    options = dict(options)
    if options.pop("half", False):
        options |= half()
    module = make()
    fitted = trainer(rank, world_size, strategy, **options)
    fitted.fit(module, data(**of_data))
    if "zerox" in strategy and case.startswith("accumulate") and world_size == 2:
        inside = fitted.strategy.sharding.optimizers[0].inside
        assert inside.manager.flights.num_launched == 2 * len(inside.buckets), "more than a step's last batch was sent"
    found = [tensor.detach().clone().float() for tensor in (*module.parameters(), *module.buffers())]
    return found, module.losses, as_on_rank_0(values(module))


def fit_all(rank: int, world_size: int, case: str) -> list[tuple[list[Tensor], list[float], bool]]:
    ddp = "ddp_find_unused_parameters_true" if case == "manual optimization" else "ddp"
    return [fit(rank, world_size, case, name) for name in (ddp, *(f"zerox_stage_{stage}" for stage in STAGES))]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_a_module_trains_as_with_ddp_and_torch_s_optimizer(case: str, world_size: int) -> None:
    for ddp, *ours in run(fit_all, world_size, case):
        for stage, (params, losses, same) in zip(STAGES, ours, strict=True):
            assert difference(params, ddp[0]) <= TOLERANCE, stage
            assert losses == pytest.approx(ddp[1], abs=1e-5)
            assert same, "ranks have other parameters"
