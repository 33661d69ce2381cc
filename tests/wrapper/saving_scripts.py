"""How public scripts save by rank 0 and go on: imagenet's, nanoGPT's, MAE's, DINO's, DETR's and timm's.

The scripts themselves are in clients/."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.wrapper.script_cases import Detector
from tests.wrapper.twins import Script

BEGUN, MORE = 3, 3  # steps before the save, and after


class Training:
    """One script. ``file``: which it goes on from. ``kept``: what has a state of its own beside the model and the
    optimizer."""

    file: str

    def __init__(self, script: Script) -> None:
        self.script = script
        self.kept: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        self.model = self.script.wrap(self.script.net())
        self.optimizer = self.script.optimizer(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.script.loss(self.model, number).backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """By name, as most do it."""
        saved = torch.load(folder / self.file, map_location="cpu")
        for key, each in self.named().items():
            each.load_state_dict(saved[key])

    def named(self) -> dict[str, Any]:
        """What is in the file."""
        return {"model": self.model.module, "optimizer": self.optimizer, **self.kept}

    def saved(self) -> dict[str, Any]:
        return {key: each.state_dict() for key, each in self.named().items()}

    def run(self, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            self.step(number)


class Imagenet(Training):
    """Under torchrun each rank is its machine's first, and all write the same file. A schedule goes with it."""

    file = "checkpoint.pth.tar"

    def build(self) -> None:
        super().build()
        self.kept["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def step(self, number: int) -> None:
        super().step(number)
        self.kept["scheduler"].step()

    def named(self) -> dict[str, Any]:
        return {"state_dict": self.model, "optimizer": self.optimizer, **self.kept}

    def save(self, folder: Path) -> None:
        path = folder / f"rank{self.script.rank}.pth.tar"  # of a file that several write at once nothing can be said
        torch.save({"epoch": 1, **self.saved()}, path)
        if self.script.rank == 0:
            shutil.copyfile(path, folder / self.file)


class NanoGpt(Training):
    """The module's state, without the wrapper's prefix, and two groups; rank 0 evaluates before it saves."""

    file = "ckpt.pt"

    def build(self) -> None:
        net = self.script.net()
        decayed = [param for param in net.parameters() if param.dim() >= 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [param for param in net.parameters() if param.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = self.script.optimizer(groups, lr=0.01, betas=(0.9, 0.95))
        self.model = self.script.wrap(net)

    def step(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        for micro in range(2):
            self.model.require_backward_grad_sync = micro == 1
            (self.script.loss(self.model, 2 * number + micro) / 2).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        if self.script.rank == 0:
            with torch.no_grad():
                self.script.loss(self.model.module, 70)
            torch.save({"iter_num": 3, **self.saved()}, folder / self.file)


class Mae(Training):
    """A scaler's state beside them."""

    file = "checkpoint-0.pth"

    def build(self) -> None:
        super().build()
        self.kept["scaler"] = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(self, number: int) -> None:
        scaler = self.kept["scaler"]
        scaler.scale(self.script.loss(self.model, number)).backward()
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        saved = {"epoch": 0, **self.saved()}  # on all ranks
        if self.script.rank == 0:
            torch.save(saved, folder / self.file)


class Dino(Training):
    """A teacher that follows the student; both are saved by name, and all that has a state is loaded by name."""

    file = "checkpoint.pth"

    def build(self) -> None:
        super().build()
        self.kept["teacher"] = copy.deepcopy(self.script.net()).requires_grad_(False)
        self.kept["teacher"].load_state_dict(self.model.module.state_dict())

    def step(self, number: int) -> None:
        x, teacher = self.script.data(number), self.kept["teacher"]
        self.optimizer.zero_grad()
        (self.model(x) - teacher(x)).square().mean().add(self.script.loss(self.model, number)).backward()
        self.optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(self.model.module.parameters(), teacher.parameters(), strict=True):
                theirs.data.mul_(0.9).add_(0.1 * ours.detach().data)

    def named(self) -> dict[str, Any]:
        return {"student": self.model, "optimizer": self.optimizer, **self.kept}

    def save(self, folder: Path) -> None:
        saved = self.saved()  # on all ranks
        if self.script.rank == 0:
            torch.save(saved, folder / self.file)


class Detr(Training):
    """Frozen layers are in the model and not in the optimizer, which has two rates."""

    file = "checkpoint.pth"

    def build(self) -> None:
        torch.manual_seed(self.script.rank)
        net = Detector()
        self.model = self.script.wrap(net)
        trained = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in trained if "backbone" not in name]},
            {"params": [param for name, param in trained if "backbone" in name], "lr": 0.001},
        ]
        self.optimizer = self.script.optimizer(groups, lr=0.01, weight_decay=1e-4)
        self.kept["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.script.loss(self.model, number).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.kept["lr_scheduler"].step()

    def save(self, folder: Path) -> None:
        for name in (self.file, "checkpoint0000.pth"):
            saved = self.saved()  # on all ranks
            if self.script.rank == 0:
                torch.save(saved, folder / name)


class Timm(Training):
    """Rank 0's saver has an average of the weights too, and links the best file."""

    file = "model_best.pth.tar"

    def build(self) -> None:
        super().build()
        self.kept["average"] = copy.deepcopy(self.model.module).requires_grad_(False)

    def step(self, number: int) -> None:
        super().step(number)
        with torch.no_grad():
            for theirs, ours in zip(self.kept["average"].parameters(), self.model.module.parameters(), strict=True):
                theirs.lerp_(ours.detach(), 0.2)

    def named(self) -> dict[str, Any]:
        average = self.kept["average"]
        return {"state_dict": self.model.module, "optimizer": self.optimizer, "state_dict_ema": average}

    def save(self, folder: Path) -> None:
        if self.script.rank == 0:
            torch.save(self.saved(), folder / "tmp.pth.tar")
            (folder / "tmp.pth.tar").replace(folder / "last.pth.tar")
            (folder / self.file).hardlink_to(folder / "last.pth.tar")


SCRIPTS: dict[str, Callable[[Script], Training]] = {
    each.__name__: each for each in (Imagenet, NanoGpt, Mae, Dino, Detr, Timm)
}
